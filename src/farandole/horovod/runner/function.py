"""`horovod.run`: one Python function on several processes, and what it returned on each.

See [Note: a process of its own].
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import FAILURE
from ...core.vocabulary.text import install_command
from ...launch.function_job import read_results, run_job, write_function
from ..as_horovod import SHIM

RUN_DIRECTORY = "run"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    network_interface: str | Sequence[str] | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on `num_proc` processes and return the results by rank.

    The function and its results travel as pickles (cloudpickle) through a folder that only this user can
    read. It is removed at the end; of a job that failed the logs are left, and its message says where.
    Parameters are the flags of ``farandole run`` of the same names.

    Raises ValueError for arguments that exclude each other, `ConfigError` for others that make no sense,
    and RuntimeError, naming the first rank that failed and its traceback, when the job fails.
    """
    num_proc = _renamed("np", np, "num_proc", num_proc)
    min_num_proc = _renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _renamed("max_np", max_np, "max_num_proc", max_num_proc)
    interfaces = _renamed("network_interface", network_interface, "network_interfaces", network_interfaces)
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if host_discovery_script is not None and (hosts is not None or hostfile is not None):
        raise ValueError("Argument host_discovery_script excludes hosts and hostfile.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    size = num_proc if num_proc is not None else 1 if min_num_proc is None else min_num_proc
    flags: dict[str, Any] = {
        "-np": size,
        "--min-np": min_num_proc,
        "--max-np": max_num_proc,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "-H": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": ",".join(interfaces) if isinstance(interfaces, (list, tuple)) else interfaces,
    }
    words: list[str] = []
    for name, value in flags.items():
        if value is not None:
            words += [name, str(value)]
    if mpi_args is not None:
        words.append(f"--mpi-args={mpi_args}")
    if cooldown_range is not None:
        words += ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    for name, wanted in (("--disable-cache", disable_cache), ("--gloo", use_gloo), ("--mpi", use_mpi)):
        words += [name] if wanted else []
    words += ["--verbose"] if verbose and int(verbose) > 1 else []
    if "horovod" in sys.modules and str(SHIM) in str(sys.modules["horovod"].__file__):
        words.append("--as-horovod")
    folder = Path(tempfile.mkdtemp(prefix="farandole-run-"))
    try:
        _write(folder, func, tuple(args), dict(kwargs or {}))
        _start(words, executable or sys.executable, folder)
        return read_results(folder, size if min_num_proc is None else min_num_proc)
    finally:
        if (folder / RUN_DIRECTORY / FAILURE).exists():
            for pickled in folder.glob("*.pkl"):
                pickled.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _renamed(old: str, old_value: Any, new: str, value: Any) -> Any:
    """Return the value of a parameter that has an older name, too."""
    if old_value is None:
        return value
    warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)
    return old_value if value is None else value


def _write(folder: Path, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        write_function(folder, func, args, kwargs)
    except ModuleNotFoundError:
        raise ConfigError(
            "horovod.run needs cloudpickle to hand the function to its processes",
            remedy=f"install it with: {install_command('horovod')}",
        ) from None


def _start(words: Sequence[str], python: str, folder: Path) -> None:
    """Start the launcher and wait for it; raise for a job that did not end well."""
    ended = run_job(["--quiet", *words], python, folder, folder / RUN_DIRECTORY)
    if ended.code == 0:
        return
    failure = ended.failure
    if failure is None:
        if ended.code == ConfigError.exit_code:
            raise ConfigError(ended.said)
        raise RuntimeError(f"the job ended with exit code {ended.code}:\n{ended.said}")
    raise RuntimeError(
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated. The first process to do so was:\nProcess name: {failure['rank']}\n"
        f"Exit code: {failure['exit_code']}\n{failure['cause']}\n{failure['traceback']}".rstrip("\n")
    )

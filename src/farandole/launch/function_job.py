"""One Python function as a job: handed to ranks in a folder, started by ``farandole run``, its results read.

[Note: a process of its own] The job is started by a ``farandole run`` beside us: the launcher forks, and handles
signals, and a notebook full of threads is no place for either. So it does not matter what this process has
initialised, CUDA among it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..core.env import inherited_environment
from ..core.rank_variables import read_rank_variables
from ..core.vocabulary.run_files import FAILURE, write_private
from .supervise.process import stopping_with_us

# A rank that calls one function: it reads the function from the job's folder and leaves the result there.
#
# The folder is 0700 and its files are 0600, so that no other user can replace a pickle.

FUNCTION = "function.pkl"


def result_path(folder: Path, rank: int) -> Path:
    """Return where rank `rank` leaves its result."""
    return folder / f"result_{rank}.pkl"


def main(folder: Path) -> None:
    """Call the function of `folder`."""
    import cloudpickle

    function, args, kwargs = pickle.loads((folder / FUNCTION).read_bytes())
    result = function(*args, **kwargs)
    place = read_rank_variables()
    write_private(result_path(folder, place.rank if place else 0), cloudpickle.dumps(result))


# Starting ``farandole run`` for one function, and watching it until it ends.

STOP_SECONDS = 10.0
"""From passing on an interrupt to the end of patience with the launcher, which needs at most 4 s."""
_KEPT_LINES = 40


def write_function(
    folder: Path, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Leave a function and its arguments for the ranks, by cloudpickle; whatever that raises comes through."""
    import cloudpickle

    write_private(folder / FUNCTION, cloudpickle.dumps((function, args, kwargs)))


def read_results(folder: Path, count: int) -> list[Any]:
    """Return what the function returned on each rank; raise `RuntimeError` for a rank that left nothing."""
    results = []
    for rank in range(count):
        path = result_path(folder, rank)
        if not path.exists():
            raise RuntimeError(f"rank {rank} ended well but left no result; did the function call os._exit?")
        results.append(pickle.loads(path.read_bytes()))
    return results


class JobEnd(NamedTuple):
    """How a job ended."""

    code: int
    failure: dict[str, Any] | None
    """What the launcher wrote of the first rank that failed, if one did."""
    said: str
    """The last lines of its standard error."""


def run_job(words: Sequence[str], python: str, folder: Path, run_directory: Path) -> JobEnd:
    """Run the function of `folder` by ``farandole run WORDS``, in `run_directory`, and wait for its end."""
    command = [
        sys.executable, "-m", "farandole", "run", "--run-dir", str(run_directory), *words,
        "--", python, "-m", "farandole.launch.function_job", str(folder),
    ]  # fmt: skip
    code, lines = _watch(command)
    said = "\n".join(lines).removeprefix("farandole: ") or f"exit code {code}"
    try:
        failure = json.loads((run_directory / FAILURE).read_text(encoding="utf-8")) if code else None
    except (OSError, ValueError):
        failure = None
    return JobEnd(code, failure, said)


def start_importing(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start `command`, which imports what this process can, in a session of its own; its output comes by pipes."""
    path = [str(Path(entry or ".").resolve()) for entry in sys.path]  # functions travel by their names
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env=inherited_environment({"PYTHONPATH": os.pathsep.join(path)}), start_new_session=True,
        preexec_fn=stopping_with_us(),  # noqa: PLW1509 - sets one flag, takes no lock
    )  # fmt: skip


def _watch(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run `command` in a session of its own, passing its output on to `sys.stdout` and `sys.stderr`."""
    process = start_importing(command)
    assert process.stdout is not None, "a pipe"
    assert process.stderr is not None, "a pipe"
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    pumps = [
        threading.Thread(target=_pass_on, args=(process.stdout, sys.stdout, None), daemon=True),
        threading.Thread(target=_pass_on, args=(process.stderr, sys.stderr, last), daemon=True),
    ]
    for pump in pumps:
        pump.start()
    try:
        code = process.wait()
    except BaseException:
        _stop(process)
        raise
    finally:
        for pump in pumps:
            pump.join()
        process.stdout.close()
        process.stderr.close()
    return code, list(last)


def _stop(process: subprocess.Popen[str]) -> None:
    """Pass an interrupt on, as a terminal would, and see that the launcher is gone."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its reaper ends the ranks
        process.wait()


def _pass_on(source: IO[str], sink: IO[str], kept: deque[str] | None) -> None:
    for line in source:
        if kept is not None:
            kept.append(line.rstrip("\n"))
        try:
            sink.write(line)
            sink.flush()
        except (OSError, ValueError):
            continue  # the reader is gone; the job goes on


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Running another starter (srun, mpirun) in our place: its output is ours, signals reach it, its end is ours."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence

from ...core.environ.env import inherited_environment
from ...core.vocabulary.errors import ConfigError, LaunchError
from ..supervise.job_loop import ENDING, handling
from ..supervise.process import stopping_with_us


def run_child(command: Sequence[str]) -> int:
    """Run `command` to its end; return its exit code, 128 + signal for a signal.

    SIGINT from a terminal reaches it by itself; sent to us alone it is passed on like the others. It gets
    SIGTERM when we die.
    """
    try:
        child = subprocess.Popen(
            list(command), env=inherited_environment(), stdin=subprocess.DEVNULL,
            preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
        )  # fmt: skip
    except OSError as problem:
        raise LaunchError(f"cannot start {command[0]!r}: {problem}") from None

    # srun and mpirun want SIGINT once, then wait: ours to pass on, unless the terminal did.
    with handling((*ENDING, signal.SIGUSR1), lambda number, _: child.send_signal(number)):
        code = child.wait()
    return 128 - code if code < 0 else code


def need_command(name: str, remedy: str) -> str:
    """Return the path of a command; raise `ConfigError` when there is none."""
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"{name} was not found", remedy=remedy)
    return path

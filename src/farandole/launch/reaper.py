"""The last resort: a tiny process that ends the ranks when their supervisor is killed, or frozen.

Ranks die with the supervisor by themselves (PR_SET_PDEATHSIG), but not what they started, a loader's
workers for example; and nothing of a supervisor that was stopped dies. The reaper is forked before
anything else, in a session of its own, and reads a pipe of lines: the process groups to end, a directory
to remove, beats, then "done". An end of file without "done" means that the supervisor is gone; where
beats were promised, silence means that it is frozen. Every group is killed then.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import time

from .patience import Patience


class Reaper:
    """The supervisor's end of the pipe."""

    def __init__(self, *, silence_seconds: float | None = None) -> None:
        """With `silence_seconds`, `beat` has to be called more often than that."""
        supervisor = os.getpid()
        read_end, self._write_end = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._write_end)
            try:
                _reap(read_end, supervisor, silence_seconds)
            finally:
                os._exit(0)
        os.close(read_end)

    def watch(self, process_group: int) -> None:
        """Have the group killed when this process dies."""
        self._tell(f"group {process_group}")

    def remove(self, directory: str) -> None:
        """Have a directory removed when this process dies."""
        self._tell(f"tree {json.dumps(directory)}")

    def beat(self) -> None:
        """Say that this process is not frozen."""
        self._tell("beat")

    def dismiss(self) -> None:
        """All is in order: let the reaper go."""
        with contextlib.suppress(OSError):
            self._tell("done")
        os.close(self._write_end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)

    def _tell(self, line: str) -> None:
        os.write(self._write_end, line.encode() + b"\n")


def kill_group(process_group: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process group; return whether there was one."""
    try:
        os.killpg(process_group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(read_end: int, supervisor: int, silence_seconds: float | None) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    # Nothing of the supervisor's is held open: a pipe that its own caller reads must end with it.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        if int(name) != read_end:
            with contextlib.suppress(OSError):
                os.close(int(name))
    groups: list[int] = []
    trees: list[str] = []
    rest = b""
    patience = None if silence_seconds is None else Patience(silence_seconds, time.monotonic())
    while select.select([read_end], [], [], None if patience is None else patience.limit_seconds)[0]:
        if patience is not None:
            patience.heard(time.monotonic())
        piece = os.read(read_end, 4096)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "done":
                return
            if word == "group":
                groups.append(int(value))
            elif word == "tree":
                trees.append(json.loads(value))
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGKILL)
    for group in groups:
        kill_group(group)
    for tree in trees:
        shutil.rmtree(tree, ignore_errors=True)

"""The last resort: a tiny process that ends the ranks when the launcher is killed.

Ranks die with the launcher by themselves (PR_SET_PDEATHSIG), but not what they started, a loader's
workers for example. The reaper is forked before anything else, in a session of its own, and reads a
pipe: the process groups to end, then "done". An end of file without "done" means that the launcher is
gone, and every group is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Reaper:
    """The launcher's end of the pipe."""

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._write_end)
            try:
                _reap(read_end)
            finally:
                os._exit(0)
        os.close(read_end)

    def watch(self, process_group: int) -> None:
        """Have the group killed when this process dies."""
        os.write(self._write_end, f"{process_group}\n".encode())

    def dismiss(self) -> None:
        """All is in order: let the reaper go."""
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"done\n")
        os.close(self._write_end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


def kill_group(process_group: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process group; return whether there was one."""
    try:
        os.killpg(process_group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(read_end: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    # Nothing of the launcher's is held open: a pipe that the launcher's own caller reads must end with it.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        if int(name) != read_end:
            with contextlib.suppress(OSError):
                os.close(int(name))
    text = b""
    while piece := os.read(read_end, 4096):
        text += piece
    lines = text.decode().split()
    if "done" not in lines:
        for line in lines:
            kill_group(int(line))

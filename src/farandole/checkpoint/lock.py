"""The lock of a directory of checkpoints: one job writes to it at a time.

A lock of the kernel (``flock``), which goes with the process that holds it. The file says who that is.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ..core.vocabulary.errors import CheckpointError
from .directory import DIRECTORY_MODE, FILE_MODE, sync_directory

NAME = ".lock"
_WAIT_SECONDS = 2.0
"""For a holder that is ending."""


class DirectoryLock:
    """The lock of one directory, held until `release`."""

    def __init__(self, directory: Path, host: str, nonce: str) -> None:
        """Make the directory and lock it.

        Raises `CheckpointError` if another process holds it, naming that, or if the directory cannot be written.
        """
        try:
            directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            with suppress(PermissionError):  # /home and /scratch are often 0711: entered, and not read
                sync_directory(directory.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._descriptor = os.open(directory / NAME, flags, FILE_MODE)
        except OSError as problem:
            raise CheckpointError(
                f"cannot write checkpoints to {directory}: {problem.strerror or problem}",
                is_input=True,
                remedy="give a directory that this user may write",
            ) from None
        try:
            self._take(directory)
            holder = {"host": host, "process": os.getpid(), "nonce": nonce, "time": time.strftime("%FT%T%z")}
            text = json.dumps(holder).encode()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)
            os.fsync(self._descriptor)
        except OSError as problem:
            self.release()
            raise CheckpointError(f"cannot write {directory / NAME}: {problem.strerror or problem}") from None
        except CheckpointError:
            self.release()
            raise

    def release(self) -> None:
        """Let others write. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _take(self, directory: Path) -> None:
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.05)
                    continue
                raise CheckpointError(
                    f"{directory} is written by another job: {_describe(self._descriptor)}",
                    is_input=True,
                    remedy="give each job a directory of its own",
                ) from None
            return


def read_nonce(directory: Path) -> str | None:
    """Return the nonce of who holds the lock, as seen from this host; None if there is none to be seen."""
    try:
        holder = json.loads((directory / NAME).read_bytes())
    except (OSError, ValueError):
        return None
    nonce = holder.get("nonce") if isinstance(holder, dict) else None
    return nonce if isinstance(nonce, str) else None


def _describe(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['process']} on {holder['host']}, since {holder['time']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "its lock names no process"

"""Where a rank stands: written into the run directory when its launcher asks, even while Python is stuck.

The answer comes from a handler in C (`faulthandler`), so a rank that hangs in a system call, in a lock or in
torch answers too. One that is stopped by a signal does not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import traceback
from pathlib import Path
from types import TracebackType

from ..vocabulary.run_files import stacks_path

STACKS_SIGNAL = signal.SIGQUIT
"""Asks a rank for its stacks; ``kill -QUIT`` by hand does too."""


class StackWriter:
    """Answers `STACKS_SIGNAL` for as long as it is open, unless the program has a use for the signal itself."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        """Raises OSError when the file cannot be made."""
        self._path = stacks_path(run_directory, rank)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # It is ignored in what a script starts in the background: not because this program was asked to.
        self._before_dump: int | None = None
        """Size of the file before the first `dump` that was not taken back."""
        self._answers = signal.getsignal(STACKS_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
        if self._answers:
            faulthandler.register(STACKS_SIGNAL, file=self._descriptor, all_threads=True)

    def write(self, error: BaseException, trace: TracebackType | None) -> None:
        """Note where an exception came from: this rank was waiting there, and waits no more."""
        text = "Most recent call last:\n" + "".join(traceback.format_exception(type(error), error, trace))
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode(errors="replace"))

    def dump(self, thread: int) -> None:
        """Write the stacks of all threads now, marked as if `thread` had; raises OSError."""
        if self._before_dump is None:
            self._before_dump = os.fstat(self._descriptor).st_size
        else:
            os.ftruncate(self._descriptor, self._before_dump)
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().replace(b"Current thread 0x", b"Thread 0x")
        os.write(self._descriptor, text.replace(b"Thread 0x%016x" % thread, b"Current thread 0x%016x" % thread))

    def take_back(self) -> None:
        """Forget what `dump` wrote: this rank goes on. Raises OSError."""
        size, self._before_dump = self._before_dump, None
        if size is not None:
            os.ftruncate(self._descriptor, size)

    def forget(self) -> None:
        """In a forked child: answer no more; the file is the parent's."""
        if self._answers:
            faulthandler.unregister(STACKS_SIGNAL)
        os.close(self._descriptor)

    def close(self) -> None:
        """Answer no more, and leave no empty file."""
        if self._answers:
            faulthandler.unregister(STACKS_SIGNAL)
        with contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size == 0:
                self._path.unlink()
                self._path.parent.rmdir()  # for the last of this host
        os.close(self._descriptor)

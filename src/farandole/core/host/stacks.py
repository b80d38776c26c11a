"""Stacks of threads, and what is done with an error that nothing catches.

The answer comes from a handler in C (`faulthandler`), so a rank that hangs in a system call, in a lock or in
torch answers too. One that is stopped by a signal does not.

[Note: frames of another thread] To read frame objects of a thread that runs (`sys._current_frames`, `f_back`) can
end the process: Python 3.11.7 did so, by a signal, within some minutes of thousands of reads a second beside
exchanges of torch's process groups. `faulthandler` makes no objects, so its text is what stacks are read from.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ..env import read_run_settings
from ..rank_variables import read_rank_variables
from ..vocabulary.errors import ConfigError, FarandoleError
from ..vocabulary.run_files import Crash, stacks_path
from ..vocabulary.text import write_notice

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")

STACKS_SIGNAL = signal.SIGQUIT
"""Asks a rank for its stacks; ``kill -QUIT`` by hand does too."""


class StackFrame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str


def stack_of(thread: int) -> list[StackFrame]:
    """Return where a thread of this process is, the innermost frame first, at most 100 of them.

    Empty when it has ended, and when 100 others began after it. See [Note: frames of another thread].
    """
    with os.fdopen(os.memfd_create("farandole-stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("ascii", "replace")
    found: list[StackFrame] = []
    is_inside = False
    for line in text.splitlines():
        if match := _THREAD.match(line):
            is_inside = int(match[1], 16) == thread
        elif is_inside and (match := _FRAME.match(line)):
            number = int(match[2]) if match[2].isdecimal() else 0
            found.append(StackFrame(_plain(match[1]), number, _plain(match[3])))
    return found


def _plain(text: str) -> str:
    """Return a name as it is: what is not ASCII was written with backslashes."""
    return _ESCAPED.sub(lambda match: chr(int(match[0][2:], 16)), text)


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


# Uncaught errors of our own before there is a world: one line, and an account for the launcher.
#
# `fd.init` puts its own hook in this one's place: that one knows the world's rank and how many steps were done.

_OURS = str(Path(__file__).parents[2])


class _OneLineHook:
    """In the place of `sys.excepthook`."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, FarandoleError):
            self.previous(kind, error, trace)
            return
        error.message = f"{_place(trace)}{error.message}"
        try:
            variables, directory = read_rank_variables(), read_run_settings().run_directory
        except ConfigError:
            variables, directory = None, None
        rank = variables.rank if variables else 0
        if directory is not None:
            Crash.from_exception(
                error, trace, rank=rank, host=socket.gethostname(), step=0, ours=True,
                consequence=False, exit_code=error.exit_code,
            ).write(Path(directory))  # fmt: skip
        write_notice(str(error))
        if sys.excepthook is self:
            end_with_code_of(error)


class OutermostHook:
    """In the place of a `sys.excepthook` that holds back what is written until it returns, as torch's does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Let the inner hook write, then end with the error's code."""
        self._inner(kind, error, trace)
        if sys.excepthook is self:
            end_with_code_of(error)


def end_with_code_of(error: BaseException) -> None:
    """End the process with the exit code of an error of ours, where Python would take 1; not at a prompt.

    For the outermost hook for uncaught errors alone: what raises in an inner one keeps the others from their work.
    """
    is_prompt = bool(sys.flags.inspect) or hasattr(sys, "ps1")
    if isinstance(error, FarandoleError) and error.exit_code != FarandoleError.exit_code and not is_prompt:
        raise SystemExit(error.exit_code)


def report_uncaught_errors() -> None:
    """Show uncaught errors of our own in one line from now on; leave an account in the run directory."""
    if not isinstance(sys.excepthook, _OneLineHook):
        sys.excepthook = _OneLineHook(sys.excepthook)


def hook_before() -> Any:
    """Return the hook for uncaught errors without this module's: for one that takes its place."""
    hook = sys.excepthook
    return hook.previous if isinstance(hook, _OneLineHook) else hook


def _place(trace: TracebackType | None) -> str:
    """Return the line outside of this package that led to the error: ``train.py:12: ``."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_OURS)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""

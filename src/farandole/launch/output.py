"""What the ranks print: a prefix and a colour a rank on the console, a log file a rank.

[Note: held tracebacks] The lines of a traceback (and of our own one-line errors) that a rank writes to
stderr are held back for a moment. A rank that dies takes them with it into the failure report, which
puts the cause first; one that lives on gets them printed. The last printed line is kept for a while: a
process that holds much, or has much to do at its exit, takes its time to die of an exception.

[Note: full disks] Whatever cannot be written, a log file or a console that is a file, is written no more: that is
said once, and the job goes on.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from ..core.env import color_is_allowed
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.run_files import log_path
from ..core.vocabulary.text import NOTICE

# What stands before a rank's line on the console, and files of what each rank printed.
#
# Our own prefix is ``[rank] line``. Horovod's, which log readers match on, is ``[rank]<stdout>:line``, with
# ``-prefix-timestamp`` ``Sat Nov 21 10:00:00 2026[rank]<stdout>:line``.


PrefixName = Literal["own", "horovod", "horovod with time"]


@dataclass(frozen=True)
class OutputStyle:
    """How the ranks' output is shown and where copies of it go."""

    prefix: PrefixName = "own"
    directory: Path | None = None
    """Where to keep ``rank.<r>/stdout`` and ``rank.<r>/stderr``; None: nowhere beside the run's logs."""
    warnings_once: bool = False
    """Whether a warning that another rank has printed is left out. The logs keep it."""


OWN_STYLE = OutputStyle()


def make_prefix(style: OutputStyle, size: int) -> Callable[[int, bool], bytes]:
    """Return what gives the prefix of a line of a rank, on stdout or (True) stderr."""
    if style.prefix == "own":
        width = len(str(max(size - 1, 0)))
        return lambda rank, _: b"[%*d] " % (width, rank)
    timed = style.prefix == "horovod with time"

    def prefix(rank: int, is_error: bool) -> bytes:
        now = time.asctime().encode() if timed else b""
        return b"%b[%d]<%b>:" % (now, rank, b"stderr" if is_error else b"stdout")

    return prefix


class RankFiles:
    """``DIR/rank.<rank>/{stdout,stderr}``, ranks padded with zeros: the bytes as printed, without prefixes."""

    def __init__(
        self, directory: Path, size: int, *, first: int = 0, tell: Tell = lambda path, problem: None
    ) -> None:
        """Make the files; raise `ConfigError` when they cannot be made. `tell` hears of those that fail later."""
        self._directory = directory
        self._tell = tell
        self._first = first
        self._width = len(str(max(size - 1, 0)))
        self._files: dict[tuple[int, bool], LogFile] = {}
        self._is_made = False
        self.open(size)
        try:
            for file in self._files.values():
                file.check()
        except OSError as problem:
            self.close()
            raise ConfigError(
                f"--output-filename {self._directory}: {problem}", remedy="name a directory that can be written"
            ) from None
        self._is_made = True

    def open(self, size: int) -> None:
        """Make the files of the first `size` ranks, where they are not there yet."""
        for rank in range(self._first + len(self._files) // 2, size):
            place = self._directory / f"rank.{rank:0{self._width}d}"
            for name, is_error in (("stdout", False), ("stderr", True)):
                self._files[rank, is_error] = LogFile(place / name, self._failed, anew=True)

    def write(self, rank: int, is_error: bool, data: bytes) -> None:
        """Keep what a rank wrote."""
        self._files[rank, is_error].write(data)

    def flush(self) -> None:
        """Let readers see what was written."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _failed(self, path: Path, problem: OSError) -> None:
        if self._is_made:
            self._tell(path, problem)


HOLD_SECONDS = 0.7
LAST_WORDS_SECONDS = 60.0
"""For a process to end of the exception whose traceback it has written, without printing anything to stdout."""
PARTIAL_SECONDS = 0.5
BAR_SECONDS = 1.0
LONGEST_LINE_BYTES = 64 * 1024
_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93)
_NOTICE = NOTICE.encode()
_OPENINGS = (b"Traceback (most recent call last):", _NOTICE, b"terminate called ")
_TORCH_PREFIX = re.compile(rb"\[rank\d+\]: ?")
"""torch.distributed puts it before each line of an uncaught exception; our own prefix says the same."""


@dataclass
class _Stream:
    """One pipe of one rank."""

    pending: bytes = b""
    since: float = 0.0
    """When the pending piece of a line came, or the first held line."""
    last_bar: float = 0.0
    held: list[bytes] = field(default_factory=list)
    last_words: bytes = b""
    """Last line of a traceback that was held and printed."""
    spoken_at: float = 0.0


class Output:
    """Takes bytes from the ranks' pipes; writes lines to the console and all of it to the logs.

    For the ranks from `first` to below `size`: on a node of several, the lower ones are elsewhere.
    """

    def __init__(
        self, directory: Path, size: int, *, out: IO[bytes] | None = None, err: IO[bytes] | None = None,
        style: OutputStyle = OWN_STYLE, first: int = 0,
    ) -> None:  # fmt: skip
        self._out = out if out is not None else sys.stdout.buffer
        self._err = err if err is not None else sys.stderr.buffer
        self._colour = _is_terminal(self._out) and color_is_allowed()
        self._status_on_terminal = _is_terminal(self._err)
        self._prefix = make_prefix(style, size)
        self._coloured = style.prefix == "own"
        self._warnings = EqualWarnings() if style.warnings_once else None
        self._directory = directory
        self._first = first
        self._status = b""
        self._tracebacks_are_hidden = False
        self._has_failed = False
        """Whether it was said that a log cannot be written."""
        self._streams: dict[tuple[int, bool], _Stream] = {}
        self._logs: dict[int, LogFile] = {}
        self._copies: RankFiles | None = None
        if style.directory is not None:
            self._copies = RankFiles(style.directory, size, first=first, tell=self._log_failed)
        self.open_logs(size)

    @property
    def is_live(self) -> bool:
        """Whether the status is drawn over itself on a terminal."""
        return self._status_on_terminal

    def open_logs(self, size: int) -> None:
        """Make room for ranks below `size`; more may come while the job runs."""
        for rank in range(self._first + len(self._logs), size):
            self._logs[rank] = LogFile(log_path(self._directory, rank), self._log_failed)
        if self._copies is not None:
            self._copies.open(size)

    def feed(self, rank: int, is_error: bool, data: bytes) -> None:
        """Take what a rank wrote."""
        self._logs[rank].write(data)
        if self._copies is not None:
            self._copies.write(rank, is_error, data)
        if not is_error and (rank, True) in self._streams:
            self._streams[rank, True].last_words = b""  # it lives, and works
        stream = self._streams.setdefault((rank, is_error), _Stream())
        if not stream.pending:
            stream.since = time.monotonic()
        pieces = (stream.pending + data).splitlines(keepends=True)
        complete = pieces[-1].endswith((b"\n", b"\r")) or len(pieces[-1]) > LONGEST_LINE_BYTES
        stream.pending = b"" if complete else pieces.pop()
        for piece in pieces:
            self._line(rank, is_error, stream, piece)

    def hide_tracebacks(self) -> None:
        """Print no traceback of a rank that fails from now on: the user has ended the job. The logs have them."""
        self._tracebacks_are_hidden = True

    def tick(self) -> None:
        """Let go of what waited long enough: pieces of lines, held tracebacks."""
        now = time.monotonic()
        for (rank, is_error), stream in self._streams.items():
            if stream.held and now - stream.since > HOLD_SECONDS and not self._tracebacks_are_hidden:
                self._release(rank, is_error, stream)
            if stream.pending and not stream.held and now - stream.since > PARTIAL_SECONDS:
                piece, stream.pending = stream.pending, b""
                self._line(rank, is_error, stream, piece)
        for log in self._logs.values():
            log.flush()
        if self._copies is not None:
            self._copies.flush()

    def finish(self, rank: int, *, failed: bool) -> str:
        """The rank ended: write the rest. Return what was held when it failed, which is then not printed."""
        held = b""
        for is_error in (False, True):
            stream = self._streams.get((rank, is_error), _Stream())
            if stream.pending:
                piece, stream.pending = stream.pending, b""
                self._line(rank, is_error, stream, piece)
            if failed:
                has_only_notices = all(line.startswith(_NOTICE) for line in stream.held)
                held += b"".join([self._last_words(stream) if has_only_notices else b"", *stream.held])
                stream.held = []
            else:
                self._release(rank, is_error, stream)
        self._logs[rank].flush()
        return held.decode(errors="replace")

    def status(self, text: str | None) -> None:
        """Show `text` as the last line of a terminal; on anything else print it as a line."""
        if not self._status_on_terminal:
            if text and text.encode() != self._status:
                self._status = text.encode()
                self._write(self._err, self._status + b"\n")
            return
        self._erase()
        self._status = (text or "").encode()
        self._draw()

    def say(self, text: str) -> None:
        """Print lines of the launcher's own to stderr."""
        self._write(self._err, text.encode(errors="replace") + b"\n")

    def close(self) -> None:
        """Write the buffered text and close the logs."""
        for (rank, is_error), stream in self._streams.items():
            if not self._tracebacks_are_hidden:
                self._release(rank, is_error, stream)
        self._erase()
        self._status = b""
        for log in self._logs.values():
            log.close()
        if self._copies is not None:
            self._copies.close()

    def _line(self, rank: int, is_error: bool, stream: _Stream, line: bytes) -> None:
        if is_error:
            line = _TORCH_PREFIX.sub(b"", line, count=1) if line.startswith(b"[rank") else line
        if line.endswith(b"\r"):
            # A progress bar drawn over itself: now and then is enough.
            now = time.monotonic()
            if now - stream.last_bar < BAR_SECONDS:
                return
            stream.last_bar = now
        if is_error and (stream.held or line.startswith(_OPENINGS)):
            if not stream.held:
                stream.since = time.monotonic()
            stream.held.append(line)
            return
        self._print(rank, is_error, line)

    def _last_words(self, stream: _Stream) -> bytes:
        return stream.last_words if time.monotonic() - stream.spoken_at < LAST_WORDS_SECONDS else b""

    def _release(self, rank: int, is_error: bool, stream: _Stream) -> None:
        held, stream.held = stream.held, []
        if held:
            words = [line for line in held if line.strip()]
            said = [line for line in words if not line.startswith(_NOTICE)]
            if said or not self._last_words(stream):
                stream.last_words, stream.spoken_at = (said or words or [b""])[-1], time.monotonic()
        for line in held:
            self._print(rank, is_error, line)

    def _print(self, rank: int, is_error: bool, line: bytes) -> None:
        if is_error and self._warnings is not None and self._warnings.hides(rank, line):
            return
        prefix = self._prefix(rank, is_error)
        if self._colour and self._coloured:
            prefix = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], prefix)
        self._write(self._err if is_error else self._out, prefix + line.rstrip(b"\r\n") + b"\n")

    def _write(self, stream: IO[bytes], data: bytes) -> None:
        self._erase()
        self._put(stream, data)
        self._draw()

    def _erase(self) -> None:
        if self._status and self._status_on_terminal:
            self._put(self._err, b"\r\x1b[K")

    def _draw(self) -> None:
        if self._status and self._status_on_terminal:
            columns = 80
            with suppress(OSError, ValueError):  # the terminal may be gone
                columns = os.get_terminal_size(self._err.fileno()).columns or columns
            self._put(self._err, self._status[: columns - 1])

    def _put(self, stream: IO[bytes], data: bytes) -> None:
        """Write; a stream that cannot be written leads nowhere from then on. See [Note: full disks]."""
        try:
            stream.write(data)
            stream.flush()
        except (ValueError, BlockingIOError):
            pass  # it was closed, or its reader is gone; the logs are complete
        except OSError as problem:
            _silence(stream)
            if not isinstance(problem, BrokenPipeError) and stream is not self._err:
                self.say(f"farandole: stdout is written no more: {problem.strerror}; the job goes on")

    def _log_failed(self, path: Path, problem: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self.say(f"farandole: {path} is written no more: {problem.strerror}; the job goes on without its logs")


def _silence(stream: IO[bytes]) -> None:
    """Let a stream lead nowhere: what waits in it would fail again at every write, and at the end of Python."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()


def _is_terminal(stream: IO[bytes]) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


# A file of what a process prints. A disk that is full ends the writing, never the job.
#
# log = LogFile(path, tell=lambda path, problem: ...) log.write(b"...")


_MOST_WAITING_BYTES = 64 * 1024

Tell = Callable[[Path, OSError], None]
"""Called when a file cannot be written any more, at most once a file."""


class LogFile:
    """Appends bytes to a private file; nothing here raises OSError but `check`."""

    def __init__(self, path: Path, tell: Tell, *, anew: bool = False) -> None:
        """Open `path`, with its directory made. `anew`: what it held before is forgotten."""
        self.path, self._tell = path, tell
        self._waiting = bytearray()
        self._descriptor = -1
        self._problem: OSError | None = None
        how = os.O_TRUNC if anew else os.O_APPEND
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            self._stop(problem)

    def check(self) -> None:
        """Raise what keeps this file from being written."""
        if self._problem is not None:
            raise self._problem

    def write(self, data: bytes) -> None:
        """Take bytes; they are in the file after the next `flush`."""
        if self._descriptor >= 0:
            self._waiting += data
            if len(self._waiting) > _MOST_WAITING_BYTES:
                self.flush()

    def flush(self) -> None:
        """Let readers see what was written."""
        try:
            while self._waiting and self._descriptor >= 0:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as problem:
            self._stop(problem)

    def close(self) -> None:
        """Write what waits, and close."""
        self.flush()
        self._release()

    def _stop(self, problem: OSError) -> None:
        self._problem = problem
        self._release()
        self._tell(self.path, problem)

    def _release(self) -> None:
        self._waiting.clear()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # what a network's file system says at the end is too late for anything
                os.close(descriptor)


# Warnings that several ranks print alike: that of the first rank is shown. The logs have all of them.

_WARNING = re.compile(rb":\d+: \w*Warning: |^farandole: warning: ")
"""As Python prints a warning, ``train.py:3: UserWarning: ...``, and as Farandole does."""


class EqualWarnings:
    """What ranks have warned of so far."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        """The rank that printed a warning first."""
        self._hiding: set[int] = set()
        """Ranks whose last warning was hidden: the line of code below it is hidden with it."""

    def hides(self, rank: int, line: bytes) -> bool:
        """Return whether `line`, which `rank` wrote to stderr, belongs to a warning that another rank printed."""
        if rank in self._hiding and line.startswith(b"  "):
            return True
        self._hiding.discard(rank)
        if not _WARNING.search(line):
            return False
        is_equal = self._first.setdefault(line.strip(), rank) != rank
        if is_equal:
            self._hiding.add(rank)
        return is_equal

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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ...core.environ.env import color_is_allowed
from ...core.vocabulary.notice import NOTICE
from ...core.vocabulary.run_files import log_path
from .log_file import EqualWarnings, LogFile
from .style import OWN_STYLE, OutputStyle, RankFiles, make_prefix

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

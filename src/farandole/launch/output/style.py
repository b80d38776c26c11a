"""What stands before a rank's line on the console, and files of what each rank printed.

Our own prefix is ``[rank] line``. Horovod's, which log readers match on, is ``[rank]<stdout>:line``, with
``-prefix-timestamp`` ``Sat Nov 21 10:00:00 2026[rank]<stdout>:line``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core.vocabulary.errors import ConfigError
from .log_file import LogFile, Tell

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

"""A host's part of the run directory on its way to the launcher, when the hosts share no file system.

A frame is the length of a name, the name, and the next bytes of the file. Names are not trusted.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from ....core.framing import FrameError
from ....core.vocabulary import run_files

MOST_FILE_BYTES = 1 << 28
MOST_FILES = 10_000
_PIECE_BYTES = 1 << 18
_LENGTH = struct.Struct("!H")
_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,128}(?:/(?!\.)[A-Za-z0-9_.-]{1,128}){0,4}")
_LAUNCHERS_OWN = (
    run_files.RUN, run_files.PLAN, run_files.SUMMARY, run_files.REPORT, run_files.FAILURE, run_files.INTERRUPTED,
)  # fmt: skip


def file_frames(directory: Path) -> Iterator[bytes]:
    """Return the payloads that carry the plain files below `directory`, but not those the launcher writes."""
    for count, path in enumerate(sorted(directory.rglob("*"))):
        name = path.relative_to(directory).as_posix()
        if count >= MOST_FILES:
            return
        if path.is_symlink() or not path.is_file() or not _NAME.fullmatch(name) or name in _LAUNCHERS_OWN:
            continue
        head = _LENGTH.pack(len(name)) + name.encode()
        try:
            with path.open("rb") as file:
                yield head
                sent = 0
                while sent < MOST_FILE_BYTES and (piece := file.read(_PIECE_BYTES)):
                    sent += len(piece)
                    yield head + piece
        except OSError:
            continue  # gone or unreadable: the others are worth having


class FileTaker:
    """Writes what one host sends below the run directory; never over a file that another wrote."""

    def __init__(self, directory: Path, host: str, say: Callable[[str], None]) -> None:
        """`say` is told once when the disk does not take it: the rest is then thrown away."""
        self._directory, self._host, self._say = directory, host, say
        self._is_full = False
        self._aside = directory / "hosts" / re.sub(r"[^A-Za-z0-9_.-]", "_", host)
        self._places: dict[str, Path] = {}
        self._bytes: dict[str, int] = {}

    def take(self, payload: bytes) -> None:
        """Take a frame; raise `FrameError` for a name that is none, or a file without end."""
        if len(payload) < _LENGTH.size:
            raise FrameError("a file without a name")
        (length,) = _LENGTH.unpack_from(payload)
        name = payload[_LENGTH.size : _LENGTH.size + length].decode("ascii", errors="replace")
        data = payload[_LENGTH.size + length :]
        if not _NAME.fullmatch(name) or name in _LAUNCHERS_OWN:
            raise FrameError(f"file {name!r}: expected a relative name inside the run directory")
        self._bytes[name] = self._bytes.get(name, 0) + len(data)
        if self._bytes[name] > MOST_FILE_BYTES + _PIECE_BYTES or len(self._bytes) > MOST_FILES:
            raise FrameError(f"file {name!r} and those before it are more than a run directory has")
        if self._is_full:
            return
        try:
            if name not in self._places:
                self._places[name] = self._make(name)
            if data:
                with self._places[name].open("ab") as file:
                    file.write(data)
        except OSError as problem:
            self._is_full = True
            self._say(f"no more of host {self._host}'s files are kept: {problem}")

    def _make(self, name: str) -> Path:
        for place in (self._directory / name, self._aside / name):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            except FileExistsError:
                continue
            return place
        raise FrameError(f"file {name!r} was sent before")

"""Snapshots of a server on the disk of its host: written aside, then renamed, so that one is always whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from ...core.wire.framing import FrameError
from .channel import LENGTH, MOST_TEXT_BYTES, Outline, ServerMessage, tensor_views, write_text

SNAPSHOT: Final = "snapshot"
_MOST_BYTES = 1 << 50


def write_snapshot(directory: Path, messages: Sequence[ServerMessage]) -> None:
    """Write `messages` to the disk; the last snapshot stays until this one is there. Raises `OSError`."""
    aside = directory / f"{SNAPSHOT}.new"
    try:
        with aside.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            for message in messages:
                text = write_text(message)
                file.write(LENGTH.pack(len(text)) + text)
                for view in tensor_views(message):
                    file.write(view)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(directory / SNAPSHOT)
    except OSError:
        with suppress(OSError):
            aside.unlink()  # a full disk needs the room
        raise
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_snapshot(directory: Path) -> list[ServerMessage]:
    """Return the messages of the last snapshot; empty without one. Raises `FrameError` for a damaged one."""
    try:
        file = (directory / SNAPSHOT).open("rb")
    except FileNotFoundError:
        return []
    found = []
    with file:
        while head := file.read(LENGTH.size):
            if len(head) < LENGTH.size or (length := LENGTH.unpack(head)[0]) > MOST_TEXT_BYTES:
                raise FrameError(f"{directory / SNAPSHOT} is damaged after {file.tell()} bytes")
            outline = Outline.read(file.read(length), _MOST_BYTES)
            memory = torch.empty(outline.nbytes, dtype=torch.uint8)
            if outline.nbytes and file.readinto(memory.numpy().data) != outline.nbytes:
                raise FrameError(f"{directory / SNAPSHOT} ends after {file.tell()} bytes, in a tensor")
            found.append(outline.message(memory))
    return found


class SnapshotWriter:
    """Writes snapshots in a thread of its own, one at a time. One that could not be written is kept for `again`.

    So services are asked for their next state only when the last one is on the disk (see `clock_service`).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "farandole-snapshot")
        self._writing: Future[None] | None = None
        self._snapshot: tuple[Sequence[ServerMessage], dict[int, int]] | None = None
        """What is being written, or could not be."""

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None

    @property
    def has_failed(self) -> bool:
        """Whether the last one could not be written, and waits for `again`."""
        return self._writing is None and self._snapshot is not None

    def begin(self, messages: Sequence[ServerMessage], lasts: dict[int, int]) -> None:
        """Begin to write one. `lasts`: by client the last request that is in it."""
        assert self._snapshot is None, "one at a time"
        self._snapshot = messages, lasts
        self.again()

    def again(self) -> None:
        """Begin once more to write one that could not be written."""
        assert self._snapshot is not None, "has_failed"
        self._writing = self._thread.submit(write_snapshot, self._directory, self._snapshot[0])

    def ended(self, *, wait: bool = False) -> dict[int, int] | None:
        """Return the `lasts` of a snapshot that is on the disk now; None: none is since the last call.

        Raises `OSError` where it could not be written.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return None
        writing, self._writing = self._writing, None
        writing.result()
        assert self._snapshot is not None, "it was written"
        (_, lasts), self._snapshot = self._snapshot, None
        return lasts

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)

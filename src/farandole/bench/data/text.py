"""Text that is on every machine: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

from ...core.vocabulary.errors import DataError

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
VALIDATION_SHARE = 0.1
SMALLEST_WINDOWS = 20
"""Text for fewer windows is refused: the validation part would have none."""


class ByteWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes that do not overlap, each with the same shifted by one as its target."""

    def __init__(self, data: torch.Tensor, context: int) -> None:
        self._data = data
        self._context = context

    def __len__(self) -> int:
        return max(0, (self._data.numel() - 1) // self._context)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = self._data[index * self._context : (index + 1) * self._context + 1].to(torch.int64)
        return window[:-1], window[1:]


def load_text(*, context: int, limit_bytes: int = 4_000_000) -> tuple[ByteWindows, ByteWindows]:
    """Return training and validation windows of `context` bytes; the last tenth is for validation.

    The files are taken in the order of their names, so the text is the same on every start.
    """
    if context < 1:
        raise DataError(f"a context of {context} bytes, expected 1 or more", remedy="give a larger context")
    least = SMALLEST_WINDOWS * context
    if limit_bytes < least:
        raise DataError(
            f"limit_bytes is {limit_bytes}, expected at least {least} for windows of {context} bytes",
            remedy="raise limit_bytes or shorten the context",
        )
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts[:-1]))
    pieces: list[bytes] = []
    size = 0
    for path in paths:
        try:
            pieces.append(path.read_bytes())
        except OSError:
            continue
        size += len(pieces[-1])
        if size >= limit_bytes:
            break
    data = torch.frombuffer(bytearray(b"".join(pieces)[:limit_bytes]), dtype=torch.uint8) if size else None
    if data is None or data.numel() < least:
        raise DataError(
            f"only {size} bytes of Python source below {root}, expected at least {least}",
            remedy="install Python with its standard library's sources",
        )
    cut = int(data.numel() * (1 - VALIDATION_SHARE))
    return ByteWindows(data[:cut], context), ByteWindows(data[cut:], context)

"""How the positions of sparse entries are written: by density, the same way on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

WORD_SPAN = 65536


@dataclass(frozen=True)
class Positions:
    """The coding of `kept` ascending positions among `count`.

    ``bits``: one bit an element. ``words``: 16 bits a position, and for every span of 65,536 elements how
    many fall into it. The shorter one is used.
    """

    count: int
    kept: int

    @property
    def spans(self) -> int:
        """How many spans of 65,536 elements there are."""
        return max(1, -(-self.count // WORD_SPAN))

    @property
    def coding(self) -> Literal["bits", "words"]:
        """Which coding is shorter."""
        return "bits" if -(-self.count // 8) <= 2 * self.kept + 4 * self.spans else "words"

    @property
    def nbytes(self) -> int:
        """Bytes of the coded positions, a multiple of 4."""
        plain = -(-self.count // 8) if self.coding == "bits" else 2 * self.kept + 4 * self.spans
        return -(-plain // 4) * 4

    def encode(self, positions: np.ndarray) -> np.ndarray:
        """Return the bytes that stand for `positions` (int64, ascending)."""
        out = np.zeros(self.nbytes, np.uint8)
        if self.coding == "bits":
            mask = np.zeros(self.count, np.uint8)
            mask[positions] = 1
            packed = np.packbits(mask)
            out[: packed.size] = packed
        else:
            head = 4 * self.spans
            out[:head] = np.bincount(positions // WORD_SPAN, minlength=self.spans).astype(np.int32).view(np.uint8)
            out[head : head + 2 * self.kept] = (positions % WORD_SPAN).astype(np.uint16).view(np.uint8)
        return out

    def decode(self, coded: np.ndarray) -> np.ndarray:
        """Return the positions."""
        if self.coding == "bits":
            return np.flatnonzero(np.unpackbits(coded[: -(-self.count // 8)], count=self.count))
        head = 4 * self.spans
        counts = coded[:head].view(np.int32)
        low = coded[head : head + 2 * self.kept].view(np.uint16).astype(np.int64)
        return low + np.repeat(np.arange(self.spans, dtype=np.int64) * WORD_SPAN, counts)

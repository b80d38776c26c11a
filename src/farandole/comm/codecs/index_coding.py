"""How the positions of sparse entries are written: by density, the same way on all ranks.

On an accelerator the same bytes are made of tensors there, whose sizes the host knows: none depends on a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

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

    def encode_on_device(self, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Write what `encode` returns into `out` (uint8, zeros, on the device of `positions`)."""
        device = positions.device
        if self.coding == "bits":
            flags = torch.zeros(-(-self.count // 8) * 8, dtype=torch.uint8, device=device)
            flags.index_fill_(0, positions, 1)
            out[: flags.numel() // 8].copy_((flags.view(-1, 8) << _bit_shifts(device)).sum(1))
            return
        head = 4 * self.spans
        counts = torch.zeros(self.spans, dtype=torch.int32, device=device)
        ones = torch.ones(1, dtype=torch.int32, device=device).expand(self.kept)
        out[:head].view(torch.int32).copy_(counts.index_add_(0, positions // WORD_SPAN, ones))
        low = (positions % WORD_SPAN).to(torch.int32).view(torch.uint8).view(-1, 4)[:, :2]
        out[head : head + 2 * self.kept].view(-1, 2).copy_(low)

    def add_on_device(self, coded: torch.Tensor, values: torch.Tensor, total: torch.Tensor) -> None:
        """Add `values` (kept,) to `total` (count,) at the positions that `coded` stands for."""
        device = coded.device
        if self.coding == "bits":
            bits = (coded[: -(-self.count // 8)].view(-1, 1) >> _bit_shifts(device)) & 1
            is_kept = bits.view(-1)[: self.count].bool()
            number = is_kept.cumsum(0).sub_(1).clamp_(min=0)
            total.add_(torch.where(is_kept, values[number], 0.0))
            return
        head = 4 * self.spans
        ends = coded[:head].view(torch.int32).cumsum(0)
        spans = torch.searchsorted(ends, torch.arange(self.kept, dtype=torch.int64, device=device), right=True)
        low = coded[head : head + 2 * self.kept].view(-1, 2).to(torch.int64)
        total.index_add_(0, low[:, 0] + 256 * low[:, 1] + spans * WORD_SPAN, values)


def _bit_shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)

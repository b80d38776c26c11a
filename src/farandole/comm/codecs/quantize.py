"""Quantised codecs: reduce-scatter + all-gather of packed numbers.

Each rank packs one piece for every other rank; a rank unpacks the pieces it receives, adds them in
float32, packs the sum, and all ranks gather the packed sums. Bytes sent by a rank: 2 (N-1)/N of the
packed size, whatever N is. What packing means is the `Packer`'s business.

[Note: my own piece is exact] A rank's contribution to the piece it adds up itself needs no packing. What
is lost there is the rounding of the sum, which is this rank's to remember: see [Note: conservation].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as count_from
from itertools import repeat
from typing import NamedTuple, Protocol

import torch

from ..messages import Encoded, Encoding, GroupRank, Message


class Packer(Protocol):
    """Numbers to bytes and back. Works on whole blocks."""

    @property
    def block(self) -> int:
        """Elements a packed block stands for; pieces are whole blocks."""

    @property
    def stochastic(self) -> bool:
        """Whether it rounds at random."""

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of `count` packed elements."""

    def pack(self, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        """Pack 1-D float32 `values` into `packed` (uint8). `seed`: of the random numbers of this call."""

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Write the numbers that `packed` stands for."""


class Draws(NamedTuple):
    """What stochastic rounding keeps: which random numbers come next."""

    seed: int
    """Another one on each rank: ranks that rounded by the same draws would err alike, and their mean as much."""
    draws: int = 0
    """Tables drawn so far."""


def _seeds(state: Draws | None) -> Iterator[int]:
    """Return the seeds of the draws that follow; zeros where none is needed."""
    return repeat(0) if state is None else (state.seed * 1_000_003 + k for k in count_from(state.draws + 1))


@dataclass(frozen=True)
class Quantized:
    """Exchanges what `packer` packs."""

    packer: Packer

    def init(self, grad: torch.Tensor, group: GroupRank) -> Draws | None:
        """See `Codec`."""
        return Draws(group.rank + 1) if self.packer.stochastic else None

    def encode(self, grad: torch.Tensor, state: Draws | None, group: GroupRank) -> Encoding:
        """See `Codec`."""
        count = grad.numel()
        piece = piece_elements(count, self.packer.block, group.size)
        asked = grad
        if piece * group.size != count:
            asked = torch.cat([grad, grad.new_zeros(piece * group.size - count)])
        rows = asked.view(group.size, piece)
        own = torch.empty_like(rows)
        length = self.packer.packed_bytes(piece)
        # Rows begin at multiples of 4 bytes, where a scale can be read.
        packed = torch.empty(group.size, -(-length // 4) * 4, dtype=torch.uint8, device=grad.device)
        seeds = _seeds(state)
        for row in range(group.size):
            if row != group.rank:
                self.packer.pack(rows[row], packed[row, :length], next(seeds))
                self.packer.unpack(packed[row, :length], own[row])
        pieces = yield Message(packed, "all_to_all")
        mine = rows[group.rank]
        total, spare = own[group.rank], torch.empty_like(mine)
        # Any order gives equal bits on all ranks, because one rank alone adds this piece up.
        added = mine
        for row in range(group.size):
            if row != group.rank:
                self.packer.unpack(pieces[row, :length], spare)
                added = torch.add(added, spare, out=total)
        torch.mul(added, 1 / group.size, out=total)
        summary = torch.empty(packed.shape[1], dtype=torch.uint8, device=grad.device)
        self.packer.pack(total, summary[:length], next(seeds))
        summaries = yield Message(summary, "all_gather")
        mean = torch.empty_like(rows)
        for row in range(group.size):
            self.packer.unpack(summaries[row, :length], mean[row])
        # Not by `alpha`, which is fused or not depending on the CPU: see `native_quantize`.
        total.sub_(mean[group.rank]).mul_(group.size)
        torch.sub(mine, total, out=total)  # `total` is own's row
        if state is not None:
            state = Draws(state.seed, state.draws + group.size)
        return Encoded(mean.view(-1)[:count], own.view(-1)[:count], state)


def piece_elements(count: int, block: int, size: int) -> int:
    """Return the elements each of `size` ranks adds up: whole blocks, enough for `count`.

    >>> piece_elements(1000, 256, 2)
    512
    """
    return max(1, -(-count // (block * size))) * block

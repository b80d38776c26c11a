"""Quantised codecs: reduce-scatter + all-gather of packed numbers.

Each rank packs one piece for every other rank; a rank unpacks the pieces it receives, adds them in
float32, packs the sum, and everybody gathers the packed sums. Bytes sent by a rank: 2 (N-1)/N of the
packed size, whatever N is. What packing means is the `Packer`'s business.

[Note: my own piece is exact] A rank's contribution to the piece it adds up itself needs no packing. What
is lost there is the rounding of the sum, which is this rank's to remember: see [Note: conservation].
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..messages.message import Codec, Encoding, GroupRank, Message, State


class Packer(Protocol):
    """Numbers to bytes and back. Works on whole blocks."""

    @property
    def block(self) -> int:
        """Elements a packed block stands for; pieces are whole blocks."""

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of `count` packed elements."""

    def pack(self, values: torch.Tensor, packed: torch.Tensor, state: State) -> None:
        """Pack 1-D float32 `values` into `packed` (uint8)."""

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Write the numbers that `packed` stands for."""


def quantised(packer: Packer) -> Codec:
    """Return the codec that exchanges what `packer` packs."""

    def codec(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        count = grad.numel()
        piece = piece_elements(count, packer.block, seat.size)
        asked = grad
        if piece * seat.size != count:
            asked = torch.cat([grad, grad.new_zeros(piece * seat.size - count)])
        rows = asked.view(seat.size, piece)
        own = torch.empty_like(rows)
        length = packer.packed_bytes(piece)
        # Rows begin at multiples of 4 bytes, where a scale can be read.
        packed = torch.empty(seat.size, -(-length // 4) * 4, dtype=torch.uint8, device=grad.device)
        for row in range(seat.size):
            if row != seat.rank:
                packer.pack(rows[row], packed[row, :length], state)
                packer.unpack(packed[row, :length], own[row])
        pieces = yield Message(packed, "exchange")
        mine = rows[seat.rank]
        total, spare = own[seat.rank], torch.empty_like(mine)
        # Any order gives equal bits on all ranks, because one rank alone adds this piece up.
        added = mine
        for row in range(seat.size):
            if row != seat.rank:
                packer.unpack(pieces[row, :length], spare)
                added = torch.add(added, spare, out=total)
        torch.mul(added, 1 / seat.size, out=total)
        summary = torch.empty(packed.shape[1], dtype=torch.uint8, device=grad.device)
        packer.pack(total, summary[:length], state)
        everyone = yield Message(summary, "gather")
        mean = torch.empty_like(rows)
        for row in range(seat.size):
            packer.unpack(everyone[row, :length], mean[row])
        # Not by `alpha`, which is fused or not as the processor has it: see codecs/fused.py.
        total.sub_(mean[seat.rank]).mul_(seat.size)
        torch.sub(mine, total, out=total)  # `total` is own's row
        return mean.view(-1)[:count], own.view(-1)[:count]

    return codec


def piece_elements(count: int, block: int, size: int) -> int:
    """Return the elements each of `size` ranks adds up: whole blocks, enough for `count`.

    >>> piece_elements(1000, 256, 2)
    512
    """
    return max(1, -(-count // (block * size))) * block

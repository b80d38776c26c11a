"""Where the rows of several tensors lie in a flat tensor of one block for each rank: pure, on shapes.

Each rank owns some rows (slices along the first dimension) of every tensor: those that `torch.chunk` gives it,
which is how a DTensor with placement ``Shard(0)`` is divided. Block b holds the rows of rank ``owners[b]``, side
by side. All blocks have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .parameters import layout_of

ALIGNMENT_BYTES = 64
"""The rows of every tensor begin on a cache line."""


class Rows(NamedTuple):
    """Some rows of one tensor, and where they lie in their block."""

    begin: int
    end: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """In elements, from the begin of the block."""


def rows_of(rows: int, size: int, rank: int) -> tuple[int, int]:
    """Return the first of `rows` rows that `rank` of `size` owns, and the one behind its last.

    >>> [rows_of(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    length = -(-rows // size)
    return min(rank * length, rows), min((rank + 1) * length, rows)


class RowBlocks:
    """The layout of `tensors` in one block a rank. Every tensor has at least one dimension."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], *, tail: int = 0, multiple: int = 1
    ) -> None:
        """Lay out; `owners`: rank by block.

        Behind its rows a block has `tail` elements for who sends it, and is a multiple of `multiple` elements and
        of a cache line long.
        """
        self.owners = tuple(owners)
        line = max(1, ALIGNMENT_BYTES // tensors[0].element_size())
        self.rows: list[list[Rows]] = []
        """By block, then by tensor."""
        longest = 0
        for owner in self.owners:
            offset, block = 0, []
            for tensor in tensors:
                begin, end = rows_of(tensor.shape[0], len(self.owners), owner)
                lengths, strides = layout_of(tensor[begin:end])
                block.append(Rows(begin, end, lengths, strides, offset))
                offset += -(-tensor[begin:end].numel() // line) * line
            self.rows.append(block)
            longest = max(longest, offset)
        self.tail = longest
        """Where the tail begins in each block."""
        unit = max(line, multiple)
        self.block_elements = -(-(longest + tail) // unit) * unit

    @property
    def elements(self) -> int:
        """Elements of all blocks."""
        return self.block_elements * len(self.owners)

    def cut(self, flat: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the rows of every tensor in one block of `flat`, in their shapes."""
        return self.views(flat[block * self.block_elements : (block + 1) * self.block_elements], block)

    def views(self, memory: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the rows of every tensor in `memory`, which is laid out as one block."""
        start = int(memory.storage_offset())
        return [memory.as_strided(each.lengths, each.strides, start + each.offset) for each in self.rows[block]]

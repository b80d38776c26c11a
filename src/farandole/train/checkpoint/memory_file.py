"""The copy of a rank's tensors in memory that its writer shares: afterwards training may go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...checkpoint.dtypes import ITEM_BYTES
from ...checkpoint.shard_file import Piece, digest, lay_out
from ...checkpoint.writer.client import Writer
from ...parallel.split import Split, boxes_here
from .division import Item
from .later_copy import LaterCopy


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A file in memory, and what the manifest will say of it."""

    nbytes: int
    header_bytes: int
    header_sha256: str
    pieces: tuple[Piece, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shape of the tensor that each piece belongs to."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each piece in the file, in bytes."""
        return [(piece.begin, piece.begin + piece.nbytes) for piece in self.pieces]

    def describe(self, name: str, hashes: Sequence[str], own: Any) -> dict[str, Any]:
        """Return what rank 0 needs for the manifest, as JSON."""
        return {
            "file": name,
            "bytes": self.nbytes,
            "header_bytes": self.header_bytes,
            "header_sha256": self.header_sha256,
            "pieces": [
                [piece.tensor, piece.dtype, shape, piece.offsets, piece.shape, piece.begin, sha256]
                for piece, shape, sha256 in zip(self.pieces, self.shapes, hashes, strict=True)
            ],
            "own": own,
        }


def copy_to_memory(
    items: Sequence[Item],
    tensors: Mapping[str, torch.Tensor],
    writer: Writer,
    later: LaterCopy | None = None,
    splits: Mapping[str, Split] | None = None,
) -> MemoryFile:
    """Copy the boxes `items` of `tensors` to the writer's memory, laid out as their file; some of them `later`.

    `splits` tells which tensors are parts of whole ones.
    """
    parts = splits or {}
    items = in_file_order(items)
    head, pieces, nbytes = lay_out([(name, dtype, offsets, shape) for name, dtype, _, offsets, shape in items])
    memory = writer.memory(nbytes)
    memory[: len(head)] = head
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    for piece in pieces:
        if piece.nbytes:
            target = whole[piece.begin : piece.begin + piece.nbytes]
            source = box_of(tensors[piece.tensor], piece.offsets, piece.shape, parts.get(piece.tensor))
            if later is None or not later.take(piece.tensor, source, target):
                target.view(source.dtype).view(source.shape).copy_(source)
    return MemoryFile(nbytes, len(head), digest(head), tuple(pieces), tuple(item[2] for item in items))


def in_file_order(items: Sequence[Item]) -> list[Item]:
    """Return `items` in the order of their file.

    Torch views bytes as a type only where they begin at a multiple of its item size.
    Types with larger items come first in the file: then each piece begins at such a multiple, and there is still
    no gap, which safetensors would refuse and no hash would cover.
    """
    return sorted(items, key=lambda item: -ITEM_BYTES[item[1]])


def whole_items(tensors: Mapping[str, torch.Tensor]) -> list[Item]:
    """Return one box for each of a rank's own tensors."""
    described = [
        (name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
    ]
    return [(name, dtype, shape, (0,) * len(shape), shape) for name, dtype, shape in described]


def box_of(
    tensor: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], split: Split | None = None
) -> torch.Tensor:
    """Return a view of the box of a tensor that begins at `offsets`, of a DTensor one in the local shard.

    `split` tells which part of a whole tensor it is: the box is one of the whole.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not all(shape):
        return local.new_empty(shape)
    for part in boxes_here(tensor, split):
        places = [at - first for at, first in zip(offsets, part.offsets, strict=True)]
        if all(at >= 0 and at + n <= most for at, n, most in zip(places, shape, part.shape, strict=True)):
            for dimension, (at, first, count) in enumerate(zip(places, part.begin, shape, strict=True)):
                local = local.narrow(dimension, at + first, count)
            return local
    raise AssertionError(f"the box {shape} at {offsets} is not on this rank")

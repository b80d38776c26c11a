"""The copy of a rank's tensors in memory that its writer shares: afterwards training may go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...checkpoint.shard_file import Piece, digest, lay_out
from ...checkpoint.writer.client import Writer
from .division import Item


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


def copy_to_memory(items: Sequence[Item], tensors: Mapping[str, torch.Tensor], writer: Writer) -> MemoryFile:
    """Copy the boxes `items` of `tensors` to the writer's memory, laid out as their file."""
    head, pieces, nbytes = lay_out([(name, dtype, offsets, shape) for name, dtype, _, offsets, shape in items])
    memory = writer.memory(nbytes)
    memory[: len(head)] = head
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    for piece in pieces:
        if piece.nbytes:
            target = whole[piece.begin : piece.begin + piece.nbytes]
            source = _box(tensors[piece.tensor], piece.offsets, piece.shape)
            target.view(source.dtype).view(source.shape).copy_(source)
    return MemoryFile(nbytes, len(head), digest(head), tuple(pieces), tuple(item[2] for item in items))


def whole_items(tensors: Mapping[str, torch.Tensor]) -> list[Item]:
    """Return one box for each of a rank's own tensors."""
    described = [
        (name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
    ]
    return [(name, dtype, shape, (0,) * len(shape), shape) for name, dtype, shape in described]


def _box(tensor: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    begin: tuple[int, ...] = (0,) * len(shape)
    if isinstance(tensor, DTensor):
        _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    for dimension, (at, first, count) in enumerate(zip(offsets, begin, shape, strict=True)):
        tensor = tensor.narrow(dimension, at - first, count)
    return tensor

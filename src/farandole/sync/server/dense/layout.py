"""Which server has which elements: the flat order of all parameters, cut by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By bytes of an element."""


@dataclass(frozen=True)
class ShardPiece:
    """Consecutive elements of one parameter, at one server."""

    parameter: int
    """Its place in the flat order."""
    begin: int
    end: int
    """Elements of the parameter, counted in the order of its indices."""


def cut_by_bytes(parameters: Sequence[torch.Tensor], servers: int) -> list[list[ShardPiece]]:
    """Return the pieces of each server: contiguous, and equal in bytes but for an element at each cut."""
    total = sum(each.nbytes for each in parameters)
    dealt: list[list[ShardPiece]] = [[] for _ in range(servers)]
    before = 0
    for number, each in enumerate(parameters):
        width, elements = each.element_size(), each.numel()
        for server in range(servers):
            # The first element of a server is the first that begins at its share of the bytes, or after it.
            ends = (-(-(total * place // servers - before) // width) for place in (server, server + 1))
            begin, end = (min(elements, max(0, place)) for place in ends)
            if end > begin:
                dealt[server].append(ShardPiece(number, begin, end))
        before += each.nbytes
    return dealt


def part_of(tensor: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
    """Return a piece of a tensor, (elements,) in CPU memory of its own."""
    flat = tensor.detach().reshape(-1)[piece.begin : piece.end]
    return flat.cpu().clone() if flat.device.type == "cpu" else flat.cpu()


def bit_sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return for each tensor the sum of its bits, read as integers: others almost surely after any change."""
    sums = []
    for each in tensors:
        flat = each.detach().reshape(-1)
        is_even = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
        kind = torch.int64 if is_even else _INTEGERS[flat.element_size()]
        sums.append(int(flat.view(kind).sum()))
    return sums


@torch.no_grad()
def put_part(tensor: torch.Tensor, piece: ShardPiece, values: torch.Tensor) -> None:
    """Write a piece into a tensor, whatever the order of its elements in memory."""
    if tensor.is_contiguous():
        tensor.detach().view(-1)[piece.begin : piece.end].copy_(values)
        return
    flat = tensor.detach().reshape(-1)
    flat[piece.begin : piece.end].copy_(values)
    tensor.copy_(flat.view(tensor.shape))

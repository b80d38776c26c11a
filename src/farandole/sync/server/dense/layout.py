"""Which server has which elements: the flat order of all parameters, cut by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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


@torch.no_grad()
def put_part(tensor: torch.Tensor, piece: ShardPiece, values: torch.Tensor) -> None:
    """Write a piece into a tensor, whatever the order of its elements in memory."""
    if tensor.is_contiguous():
        tensor.detach().view(-1)[piece.begin : piece.end].copy_(values)
        return
    flat = tensor.detach().reshape(-1)
    flat[piece.begin : piece.end].copy_(values)
    tensor.copy_(flat.view(tensor.shape))

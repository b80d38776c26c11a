"""Where the parameters of a unit lie in the rows that FSDP2 reduces, one row for each rank's shards.

A row holds, for each trained parameter in order, that rank's rows of it, filled up to the largest part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ....comm.gradients.row_blocks import rows_of

Members = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the parameters that are reduced, in order."""


def elements_of(members: Members, size: int) -> int:
    """Return the elements of a row, among `size` ranks."""
    return sum(_padded(shape, size) for _, shape in members)


def by_name(rows: torch.Tensor, members: Members) -> dict[str, torch.Tensor]:
    """Return what `rows` (ranks, elements) hold, in the shapes of the parameters; copies."""
    found = {}
    for (name, shape), parts in zip(members, _parts(rows, members), strict=True):
        found[name] = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
        for begin, end, part in parts:
            found[name][begin:end] = part
    return found


def put_into(rows: torch.Tensor, members: Members, values: Mapping[str, torch.Tensor], own: int) -> None:
    """Put `values`, by name, into `rows` (ranks, elements); nothing into row `own`."""
    for (name, _), parts in zip(members, _parts(rows, members), strict=True):
        if name in values:
            for number, (begin, end, part) in enumerate(parts):
                if number != own:
                    part.copy_(values[name][begin:end])


def _parts(rows: torch.Tensor, members: Members) -> Iterator[Sequence[tuple[int, int, torch.Tensor]]]:
    """Yield, by member, what each rank has of it: the first row, the one behind the last, and where they lie."""
    size, offset = len(rows), 0
    for _, shape in members:
        found = []
        for number, row in enumerate(rows):
            begin, end = rows_of(shape[0], size, number)
            count = (end - begin) * math.prod(shape[1:])
            found.append((begin, end, row[offset : offset + count].view(end - begin, *shape[1:])))
        yield found
        offset += _padded(shape, size)


def _padded(shape: tuple[int, ...], size: int) -> int:
    return -(-shape[0] // size) * math.prod(shape[1:])

"""How large tensors move: one conversation an operation, or one a segment of it.

Each sends the fewest bytes that are possible: a sum 2 (N-1)/N S, a broadcast as much from its root, the others
what they have to give. A sum is added up by one rank an element, so all end with the same bits.

[Note: copies of what travels in one round] A rank may have received everything while its own part still waits
for a slow link, and its caller then changes the tensor. So a copy is sent, except in a sum: there no rank has the
result before all have received this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...comm.codecs.units import UnitStates
from ...comm.messages import GroupRank, Message, accumulates_in_fp32, divide
from ...comm.transport.comm_thread import Conversation
from ...comm.transport.rank_group import HostGroups, PieceExchange, RankGroup, Within
from .group_thread import shares, zeros_matter
from .operations import Operation
from .reductions import adasum, finish, fold

_NOTHING = torch.empty(0, dtype=torch.uint8)


def reduce_everywhere(
    flat: torch.Tensor, out: torch.Tensor, operation: Operation, seat: GroupRank
) -> Conversation:
    """Reduce `flat` into `out` on all ranks of the circle. `operation` says how; `out` may be `flat`."""
    count = flat.numel()
    rows = yield Message(_in_rows(flat, seat.size), "all_to_all")
    signature = operation.signature
    if signature.reduction == "adasum":
        total = yield from adasum(
            [row.float() if accumulates_in_fp32(row.dtype) else row for row in rows], shared=seat.size > 1
        )
    else:
        total = fold(list(rows), signature.reduction, zeros_too=zeros_matter(operation))
    total = finish(total, flat.dtype, signature.reduction, operation.size, signature.postscale)
    everyone = yield Message(total, "all_gather")
    out.copy_(everyone.reshape(-1)[:count])


def reduce_by_host(
    flat: torch.Tensor, out: torch.Tensor, operation: Operation, groups: HostGroups
) -> Conversation:
    """Reduce `flat` into `out` on all ranks, inside each host first; a conversation of `groups.across`.

    Floats of 16 bits and less cross as float32 sums of their hosts, and are rounded once: see
    [Note: rounding] in `reductions`. See also [Note: copies of what travels in one round].
    """
    signature, dtype = operation.signature, flat.dtype
    rows = yield from _slices_of_host(flat, groups.inside)
    mine = fold(list(rows), signature.reduction)
    parts = yield Message(_in_rows(mine, groups.across.seat.size), "all_to_all")
    total = fold(list(parts), signature.reduction)
    total = finish(total, dtype, signature.reduction, operation.size, signature.postscale)
    everyone = yield Message(total, "all_gather")
    yield from _share_in_host(everyone.reshape(-1)[: mine.numel()], out, groups.inside)


def _slices_of_host(flat: torch.Tensor, inside: RankGroup) -> Conversation:
    """Return this rank's slice of `flat` of every rank of the host, padded with zeros."""
    rows = yield Within(inside, Message(_in_rows(flat, inside.seat.size), "all_to_all"))
    return rows


def _share_in_host(mine: torch.Tensor, out: torch.Tensor, inside: RankGroup) -> Conversation:
    """Fill `out` with the slices of all ranks of the host; `mine` is this rank's, which must not change later."""
    whole = yield Within(inside, Message(mine, "all_gather"))
    out.copy_(whole.reshape(-1)[: out.numel()])


def _in_rows(flat: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `flat` as so many rows, padded with zeros; without a copy where that is not needed."""
    length = -(-flat.numel() // rows)
    if length * rows != flat.numel():
        flat = torch.cat([flat, flat.new_zeros(length * rows - flat.numel())])
    return flat.view(rows, length)


def reduce_and_scatter(tensor: torch.Tensor, operation: Operation, seat: GroupRank) -> Conversation:
    """Return this rank's rows of the sum."""
    signature = operation.signature
    parts = tensor.clone().split(shares(tensor.shape[0], seat.size))
    mine = parts[seat.rank]
    rows = [mine if place == seat.rank else torch.empty_like(mine) for place in range(seat.size)]
    yield PieceExchange(parts, rows)
    return finish(
        fold(rows, signature.reduction), tensor.dtype, signature.reduction, seat.size, signature.postscale
    )


def gather(tensor: torch.Tensor, operation: Operation, seat: GroupRank) -> Conversation:
    """Return the rows of all ranks, in rank order."""
    rows = [each.shape[0] for each in operation.told.values()]
    out = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    places = out.split(rows)
    places[seat.rank].copy_(tensor)
    yield PieceExchange([places[seat.rank].clone()] * seat.size, places)
    return out


def swap(tensor: torch.Tensor, operation: Operation, seat: GroupRank) -> Conversation:
    """Return the rows that all ranks have for this rank, and how many each had."""
    received = [each.splits[seat.rank] for each in operation.told.values()]
    splits = operation.signature.splits
    parts = tensor[: sum(splits)].clone().split(splits)
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    places = out.split(received)
    places[seat.rank].copy_(parts[seat.rank])
    yield PieceExchange(parts, places)
    return out, torch.tensor(received, dtype=torch.int32)


def spread(flat: torch.Tensor, root: int, seat: GroupRank) -> Conversation:
    """Overwrite `flat` with the numbers of the rank in place `root`.

    The root gives each rank a part, and then all give their parts to all: its link carries twice the tensor,
    however many there are. With up to three ranks it sends everything to all: that is no more.
    """
    nothing = [_NOTHING] * seat.size
    i_am_root = seat.rank == root
    if seat.size <= 3:
        copy = flat.clone() if i_am_root else flat
        into = [flat if place == root and not i_am_root else _NOTHING for place in range(seat.size)]
        yield PieceExchange([copy] * seat.size if i_am_root else nothing, into)
        return
    parts = flat.tensor_split(seat.size)
    mine = [parts[seat.rank] if place == root and not i_am_root else _NOTHING for place in range(seat.size)]
    sent = flat.clone().tensor_split(seat.size) if i_am_root else parts
    yield PieceExchange(sent if i_am_root else nothing, mine)
    # The root has everything: no rank sends to it, and it sends its own part to all.
    outgoing = [_NOTHING if place == root else sent[seat.rank].clone() for place in range(seat.size)]
    yield PieceExchange(outgoing, nothing if i_am_root else parts)


def encode(
    flat: torch.Tensor, out: torch.Tensor, states: UnitStates, k: int, operation: Operation
) -> Conversation:
    """Reduce unit `k`, `flat` (float32), into `out` by a codec; NaN if some rank's or the mean is not finite."""
    matrix = states.codec.granularity == "matrix"
    unit = as_matrix(flat, operation.signature.shape) if matrix else flat.clone()
    yield from states.exchange_finite(k, unit)
    size = states.group.size
    factor = float(size) if operation.signature.reduction == "sum" else size / operation.size
    out.copy_((unit * (factor * operation.signature.postscale)).reshape(-1)[: out.numel()])


def encode_by_host(
    flat: torch.Tensor,
    out: torch.Tensor,
    exchange: Callable[[torch.Tensor], Conversation],
    operation: Operation,
    groups: HostGroups,
) -> Conversation:
    """Reduce a unit as `encode` does, but only the mean of each host travels by the codec, a slice a rank.

    A conversation of `groups.across`; `exchange` leaves the mean over these in the tensor that it is given.
    """
    rows = yield from _slices_of_host(flat, groups.inside)
    unit = fold(list(rows), "sum")
    divide(unit, groups.inside.seat.size)
    yield from exchange(unit)
    size = groups.inside.seat.size * groups.across.seat.size
    factor = float(size) if operation.signature.reduction == "sum" else size / operation.size
    yield from _share_in_host(unit * (factor * operation.signature.postscale), out, groups.inside)


def as_matrix(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a copy of `flat` as a matrix: the first dimension by all others."""
    return flat.clone().view(shape[0] if shape else 1, -1)

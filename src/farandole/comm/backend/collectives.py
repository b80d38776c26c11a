"""The collectives of `torch.distributed`, each once, on what every exchange offers.

They run when all ranks have agreed on the call, so lengths and types are the same on all. Tensors here are flat
and contiguous, and are written in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import Mismatch
from ..messages import accumulates_in_fp32, side_by_side, sum_into

# User tensors as exchanges want them, flat and contiguous, and how calls describe them to other ranks.

_OVERLAPS = 1
"""What torch says of a tensor with elements that certainly share memory."""


def flattened(tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
    """Return (elements,): a view of the tensor where that is possible, else room for its elements.

    Calls of a group are carried out in their order, which may be long after they were made: what is read is what
    the tensor holds then. So `take` fills the room when the call is carried out, and `land` empties it.

    Args:
        tensor: the user's.
        written: whether the call writes to it.

    Raises:
        NotImplementedError: for a tensor that is sparse, quantised, or not in CPU memory.
        ValueError: for one that is to be written to and whose elements share memory, as those of `expand` do.
    """
    if not tensor.is_cpu:
        raise NotImplementedError(f"farandole: a tensor on {tensor.device}: this backend has CPU tensors only")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = f"a tensor of layout {tensor.layout}"
        kind = "a quantised tensor" if tensor.is_quantized else "a nested tensor" if tensor.is_nested else kind
        raise NotImplementedError(f"farandole: {kind}: this backend has dense tensors only")
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return side_by_side(plain)
    if written and torch._debug_has_internal_overlap(plain) == _OVERLAPS:
        raise ValueError(
            f"farandole: a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}, whose elements "
            "share memory, cannot be written to: give its clone()"
        )
    return plain.new_empty(plain.numel())


def take(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill the room that `flattened` made for the tensor; nothing where it is a view."""
    if _is_room(flat, tensor):
        flat.view(tensor.shape).copy_(tensor.detach())


def land(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the room that `flattened` made for the tensor into it; nothing where it is a view."""
    if _is_room(flat, tensor):
        tensor.detach().copy_(flat.view(tensor.shape))


def take_all(flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """`take` each."""
    for flat, tensor in zip(flats, tensors, strict=True):
        take(flat, tensor)


def land_all(flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """`land` each."""
    for flat, tensor in zip(flats, tensors, strict=True):
        land(flat, tensor)


def _is_room(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool(flat.numel()) and flat.data_ptr() != tensor.data_ptr()


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """Return how many elements of which type: "1000 float32"."""
    parts = [f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors]
    return ", ".join(parts) if parts else "nothing"


def shortened(call: str) -> str:
    """Return a text that fits, and is equal only for equal texts."""
    if len(call) < TEXT_BYTES:
        return call
    digest = hashlib.sha256(call.encode()).hexdigest()[:16]
    return f"{call[: TEXT_BYTES - 40]}... ({digest})"


def only(tensors: Sequence[Any], name: str) -> Any:
    """Return the single entry of a list that c10d wraps it in."""
    if len(tensors) != 1:
        raise ValueError(f"farandole: {name} of {len(tensors)} tensors, expected one")
    return tensors[0]


def split(flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int] | None, ranks: int) -> list[torch.Tensor]:
    """Return one piece of `flat` for each rank; `sizes`: in rows of `tensor`, None or empty: equal ones."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(f"farandole: all_to_all of {rows} rows, which {ranks} ranks cannot divide equally")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ValueError(
            f"farandole: all_to_all: split sizes {list(sizes)} for {rows} rows and {ranks} ranks: expected "
            f"{ranks} numbers whose sum is {rows}"
        )
    width = flat.numel() // rows if rows else 0
    return list(flat.split([size * width for size in sizes]))


_REDUCE_BYTES = 8 * 2**20
"""The part of each rank's tensor that is sent at a time, where one rank receives those of all."""


def broadcast(exchange: GroupExchange, flat: torch.Tensor, root: int) -> None:
    """Give all ranks the tensor of `root`."""
    exchange.broadcast(as_bytes(flat), root)


def all_gather(exchange: GroupExchange, flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Give all ranks the tensors of all, by rank."""
    exchange.all_gather(as_bytes(flat), [as_bytes(out) for out in outs])
    outs[exchange.rank].copy_(flat)


def gather(exchange: GroupExchange, flat: torch.Tensor, outs: Sequence[torch.Tensor], root: int) -> None:
    """Give `root` the tensors of all; the others have no `outs`."""
    if exchange.rank == root:
        exchange.publish(None, {rank: as_bytes(outs[rank]) for rank in _others(exchange)}, readers=[root])
        outs[root].copy_(flat)
    else:
        exchange.publish(as_bytes(flat), {}, readers=[root])


def scatter(exchange: GroupExchange, out: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> None:
    """Give each rank its piece of those that `root` has; the others have no `pieces`."""
    if exchange.rank == root:
        outgoing = {rank: as_bytes(pieces[rank]) for rank in _others(exchange)}
        exchange.swap(outgoing, {}, out.nbytes)
        out.copy_(pieces[root])
    else:
        exchange.swap({}, {root: as_bytes(out)}, out.nbytes)


def reduce(exchange: GroupExchange, flat: torch.Tensor, root: int, operation: str) -> None:
    """Give `root` the tensors of all, combined; those of the others stay as they are."""
    step = max(1, _REDUCE_BYTES // flat.itemsize)
    for part in flat.split(step):
        if exchange.rank != root:
            gather(exchange, part, [], root)
            continue
        rows = [torch.empty_like(part) for _ in range(exchange.size)]
        gather(exchange, part, rows, root)
        combine(part, rows, operation)


def all_to_all(
    exchange: GroupExchange,
    outs: Sequence[torch.Tensor],
    pieces: Sequence[torch.Tensor],
    *,
    lengths: Sequence[Sequence[int]],
    call: str,
    names: Sequence[int],
) -> None:
    """Give each rank its piece of every rank's.

    `lengths`: of each rank, how many elements it sends to each, then how many it expects from each.

    Raises:
        Mismatch: on all ranks, when two of them disagree.
    """
    size = exchange.size
    for source in range(size):
        for target in range(size):
            sent, expected = lengths[source][target], lengths[target][size + source]
            if sent != expected:
                raise Mismatch(
                    f"rank {names[source]} sends {sent} elements to rank {names[target]}, "
                    f"which expects {expected}",
                    rank=names[exchange.rank],
                    operation=call,
                    remedy=SAME_CALLS,
                )
    longest = max(n for row in lengths for n in row) * (outs or pieces)[0].itemsize
    others = _others(exchange)
    outgoing = {rank: as_bytes(pieces[rank]) for rank in others}
    exchange.swap(outgoing, {rank: as_bytes(outs[rank]) for rank in others}, longest)
    outs[exchange.rank].copy_(pieces[exchange.rank])


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as uint8."""
    return flat.view(torch.uint8)


def _others(exchange: GroupExchange) -> list[int]:
    return [rank for rank in range(exchange.size) if rank != exchange.rank]


# What a collective is made of: agreement of all ranks, pieces that change hands, and rows that are combined.
#
# Two implementations: memory that the ranks of one host share (`host_exchange`), and messages
# (`message_exchange`). Bytes are flat uint8 tensors; a rank is a number in the group. Every method is called by
# all ranks of the group, in the same order, by one thread.


# How rows of all ranks become one: the reduce operations of `torch.distributed`, and which types each takes.
#
# Floats of 16 bits and less are combined in float32 and rounded once. Rows are combined in the order of ranks.

_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_NAMES = ("SUM", "AVG", *_PAIRWISE)
_BITWISE = ("BAND", "BOR", "BXOR")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def name_of(operation: Any, dtype: torch.dtype) -> str:
    """Return the name of a `ReduceOp`, such as "SUM".

    Raises:
        NotImplementedError: for an operation or a type that is not there.
        ValueError: for an operation that means nothing for the type.
    """
    name = next((known for known in _NAMES if operation == getattr(dist.ReduceOp, known)), None)
    if name is None:
        raise NotImplementedError(f"farandole: reduce operation {operation}: there are {', '.join(_NAMES)}")
    if not (dtype in _INTEGERS or dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(f"farandole: {name} of {dtype}")
    if name in _BITWISE and dtype not in _INTEGERS:
        raise ValueError(f"farandole: {name} of {dtype}: expected whole numbers")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"farandole: {name} of {dtype}: complex numbers have no order")
    if name == "AVG" and dtype == torch.bool:
        raise ValueError(f"farandole: AVG of {dtype}: expected numbers")
    return name


def combine(out: torch.Tensor, rows: Sequence[torch.Tensor], name: str, divisor: int = 0) -> None:
    """Write the rows, one a rank, combined by the operation `name`, into `out`, which may be one of them.

    Args:
        out: of the type of the rows; or float32 for rows of 16 bits and less, or those for rows of float32, whose
            first is of no use afterwards.
        rows: at least one.
        name: see `name_of`.
        divisor: of a mean; 0: the number of rows.
    """
    if out.dtype != rows[0].dtype and not accumulates_in_fp32(out.dtype):
        rows = [row.to(out.dtype) for row in rows]
    # The first two are read before anything is written.
    rows = [*rows[:2], *(row.clone() if row.data_ptr() == out.data_ptr() else row for row in rows[2:])]
    if len(rows) == 1:
        out.copy_(rows[0])
    elif name == "SUM":
        sum_into(out, rows, 1)
    elif name == "AVG":
        sum_into(out, rows, divisor or len(rows))
    else:
        pair = _PAIRWISE[name]
        wide = accumulates_in_fp32(out.dtype)
        total = pair(_widened(rows[0], wide), _widened(rows[1], wide))
        for row in rows[2:]:
            total = pair(total, _widened(row, wide))
        out.copy_(total)


def summed_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums that are not the last one: with it each number is rounded once."""
    return torch.float32 if accumulates_in_fp32(dtype) else dtype


def _widened(row: torch.Tensor, wide: bool) -> torch.Tensor:
    return row.float() if wide else row


TEXT_BYTES = 512
"""The most of a text that says what a rank is about to do."""
SAME_CALLS = "all ranks of a group must make the same calls, with the same sizes and types, in the same order"


class GroupExchange(Protocol):
    """The ranks of one group, seen from one of them."""

    rank: int
    size: int

    def agree(self, call: str, row: Sequence[int], seconds: float) -> list[tuple[int, ...]]:
        """Begin a call; return the `row` of every rank, when all of them make the same `call`.

        Without a row, ranks may compare their calls later, with the first bytes that they exchange; until then
        nothing is written to the caller's tensors.

        Args:
            call: what this rank is about to do, in words.
            row: whole numbers that may differ between ranks, at most twice as many as there are ranks.
            seconds: how long each wait for other ranks may be, from here to the next `agree`.

        Raises:
            Mismatch: on all ranks, when calls differ.
            PeerLost: when another rank is gone.
            Stalled: when one does not come in time.
        """

    def conclude(self) -> None:
        """End the call: return when all have made it, and when the caller may change what was sent."""

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Fill `flat` with the bytes of `root`."""

    def all_gather(self, flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        """Fill `outs`, by rank, with the bytes of all others; mine are `flat`."""

    def publish(
        self, mine: torch.Tensor | None, incoming: Mapping[int, torch.Tensor], *, readers: Sequence[int]
    ) -> None:
        """Let `readers` have my bytes (None: I give none), and fill what others give me, by rank.

        All that are given have the same length.
        """

    def swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], longest: int
    ) -> None:
        """Give each rank its piece and fill `incoming`, by rank; `longest`: bytes of the longest piece of all."""

    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """Put all ranks' `flat` combined into every rank's, with the same bits on all."""

    def reduce_scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], operation: str) -> None:
        """Put what all ranks have as the piece of this rank, combined, into `out`; pieces are equally long."""


def differing(rank: int, calls: Sequence[str], names: Sequence[int]) -> Mismatch | None:
    """Return the error for ranks whose `calls` differ; None when all are equal. `names`: their global ranks."""
    other = next((i for i, call in enumerate(calls) if call != calls[rank]), None)
    if other is None:
        return None
    mine = calls[rank]
    text = f"rank {names[rank]} is at {mine}, rank {names[other]} at {calls[other]}"
    return Mismatch(text, rank=names[rank], operation=mine, remedy=SAME_CALLS)

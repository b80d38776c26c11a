"""What a collective is made of: agreement of all ranks, pieces that change hands, and rows that are combined.

Two implementations: memory that the ranks of one host share (`host_exchange`), and messages (`message_exchange`).
Bytes are flat uint8 tensors; a rank is a number in the group. Every method is called by all ranks of the group, in
the same order, by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import Mismatch
from ..messages import accumulates_in_fp32, sum_into

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

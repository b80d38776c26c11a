"""Every kind of collective, in several sizes and types, against what one process computes alone.

Every rank makes the inputs of all ranks from their numbers, so each can compute what it must receive. Inputs are
small whole numbers: sums are exact in every type, and the comparison is for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...comm.world.world import World
from ..collectives.own_routes import make_connections
from ..collectives.route import Run

SIZES = (1, 1000, 65_537, 300_000)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip
_MOST_VALUE = 3
REDUCTIONS = {
    "sum": (dist.ReduceOp.SUM, lambda rows: rows.sum(0)),
    "min": (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    "max": (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
}


@dataclass(frozen=True)
class CollectiveCase:
    """One exchange to compare."""

    kind: str
    dtype: torch.dtype
    elements: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.elements:,} {str(self.dtype).removeprefix('torch.')}"


def cases(size: int) -> Iterator[CollectiveCase]:
    """Return all cases for so many ranks, small ones first: those whose sums fit the type."""
    for elements in SIZES:
        for kind in KINDS:
            for dtype in DTYPES:
                if _fits(kind, dtype, size):
                    yield CollectiveCase(kind, dtype, elements)


def _fits(kind: str, dtype: torch.dtype, size: int) -> bool:
    """Whole numbers up to 256 are exact in bfloat16, and in uint8 there are no larger ones."""
    narrow = dtype in (torch.bfloat16, torch.float16, torch.uint8)
    if kind.startswith("our") and not dtype.is_floating_point:
        return "gather" in kind
    return not narrow or "sum" not in kind or size * _MOST_VALUE <= 255


def inputs(case: CollectiveCase, size: int, device: torch.device) -> torch.Tensor:
    """Return all ranks' inputs, a row a rank."""
    positions = torch.arange(case.elements, device=device)
    rows = [(positions * 7 + rank * 5 + positions // 11) % (_MOST_VALUE + 1) for rank in range(size)]
    return torch.stack(rows).to(case.dtype)


def our_exchanges(world: World) -> dict[str, Run]:
    """Connect all ranks; return what makes our exchanges, by kind."""
    return {kind: make_connections(operation, world) for kind, operation in _OURS.items()}


def check(case: CollectiveCase, world: World, ours: Mapping[str, Run]) -> str:
    """Make the exchange; return what is wrong with what this rank received, or nothing."""
    device = torch.device("cpu") if case.kind in ours else world.device
    rows = inputs(case, world.size, device)
    received, expected = KINDS[case.kind](rows, world, ours.get(case.kind, world.group))
    if torch.equal(received, expected):
        return ""
    wrong = (received != expected).flatten().nonzero().flatten()
    first = int(wrong[0])
    return (
        f"{case}: {len(wrong)} of {expected.numel()} numbers are wrong, the first is element {first}: "
        f"{received.flatten()[first].item()} instead of {expected.flatten()[first].item()}"
    )


Exchanged = tuple[torch.Tensor, torch.Tensor]
"""What was received, and what it must be."""
Exchange = Callable[[torch.Tensor, World, Any], Exchanged]
"""Given all ranks' inputs, the world, and torch's group or what makes our exchange."""


def _all_reduce(name: str) -> Exchange:
    operation, reduce = REDUCTIONS[name]

    def exchange(rows: torch.Tensor, world: World, group: dist.ProcessGroup) -> Exchanged:
        mine = rows[world.rank].clone()
        dist.all_reduce(mine, op=operation, group=group)
        return mine, reduce(rows).to(rows.dtype)

    return exchange


def _broadcast(rows: torch.Tensor, world: World, group: dist.ProcessGroup) -> Exchanged:
    mine = rows[world.rank].clone()
    dist.broadcast(mine, src=world.size - 1, group=group)
    return mine, rows[-1]


def _reduce(rows: torch.Tensor, world: World, group: dist.ProcessGroup) -> Exchanged:
    mine = rows[world.rank].clone()
    dist.reduce(mine, dst=0, group=group)
    expected = rows.sum(0).to(rows.dtype)
    return (mine, expected) if world.rank == 0 else (expected, expected)  # elsewhere nothing is promised


def _scatter(rows: torch.Tensor, world: World, group: dist.ProcessGroup) -> Exchanged:
    received = torch.empty_like(rows[0])
    dist.scatter(received, list(rows) if world.rank == 0 else None, src=0, group=group)
    return received, rows[world.rank]


def _all_gather(rows: torch.Tensor, world: World, group: dist.ProcessGroup) -> Exchanged:
    received = [torch.empty_like(rows[0]) for _ in range(world.size)]
    dist.all_gather(received, rows[world.rank].clone(), group=group)
    return torch.stack(received), rows


def _all_to_all(rows: torch.Tensor, world: World, group: dist.ProcessGroup) -> Exchanged:
    """Each rank sends rank r its row, turned by r places."""
    sent = torch.stack([rows[world.rank].roll(peer) for peer in range(world.size)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    return received, torch.stack([row.roll(world.rank) for row in rows])


def _neighbours(rows: torch.Tensor, world: World, group: dist.ProcessGroup) -> Exchanged:
    """Send to the next rank, receive from the one before."""
    received = torch.empty_like(rows[0])
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    calls = [
        dist.P2POp(dist.isend, rows[world.rank].clone(), after, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received, rows[before]


def _our_all_reduce(rows: torch.Tensor, world: World, run: Run) -> Exchanged:
    """Each rank has as many parts as there are ranks: its row, turned."""
    mine = torch.stack([rows[world.rank].roll(part) for part in range(world.size)])
    expected = torch.stack([rows.roll(part, 1).sum(0) for part in range(world.size)])
    return run(mine.view(-1)).view_as(mine), expected.to(rows.dtype)


def _our_reduce_scatter(rows: torch.Tensor, world: World, run: Run) -> Exchanged:
    """The same, of which each rank gets its part."""
    whole = torch.stack([rows[world.rank].roll(part) for part in range(world.size)])
    return run(whole.view(-1)), torch.stack([row.roll(world.rank) for row in rows]).sum(0).to(rows.dtype)


def _our_all_gather(rows: torch.Tensor, world: World, run: Run) -> Exchanged:
    received = torch.zeros_like(rows)
    received[world.rank] = rows[world.rank]
    return run(received.view(-1)).view_as(rows), rows


KINDS: dict[str, Exchange] = {
    "all-reduce sum": _all_reduce("sum"),
    "all-reduce min": _all_reduce("min"),
    "all-reduce max": _all_reduce("max"),
    "reduce sum": _reduce,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "send to the next rank": _neighbours,
    "our all-reduce sum": _our_all_reduce,
    "our reduce-scatter sum": _our_reduce_scatter,
    "our all-gather": _our_all_gather,
}
_OURS = {
    "our all-reduce sum": "all_reduce", "our reduce-scatter sum": "reduce_scatter", "our all-gather": "all_gather"
}  # fmt: skip

"""One rank of ``farandole test``: collectives, the rate between hosts, training, and `fd.verify`.

Rank 0 says how far it has come, and the result, as lines of JSON on its output. Exceptions end the job, whose
launcher names rank and host.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import farandole as fd

from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..train.verify.verify import Check
from .collectives import Run
from .data import load_text
from .models import LanguageModel
from .own_routes import Connections, make_connections, make_sums

CONTEXT, BATCH = 64, 8
LEAST_STEPS = 20
AGREE_STEPS = 10
"""Steps between two looks at the clock, which is rank 0's."""
COLLECTIVE_SHARE = 0.4
"""At most this share of the time; what is skipped then is reported."""
TRANSFER_SECONDS = 0.3
ROUNDS = 4
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20


def main() -> None:
    """Prove it, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--bits-per-second", type=float, default=0.0, help="expected between hosts; 0: not known")
    options = parser.parse_args()
    world = fd.init()
    begin = time.monotonic()
    checks = [_collectives(world, COLLECTIVE_SHARE * options.seconds)]
    rate = _rate_between_hosts(world, options.bits_per_second)
    checks += _training(world, begin + options.seconds)
    if world.rank == 0:
        rows = [vars(each) for each in checks]
        _say({"result": {"ranks": world.size, "hosts": world.node_count, "bits_per_second": rate, "checks": rows}})
    fd.shutdown()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _progress(world: World, line: str) -> None:
    if world.rank == 0:
        _say({"progress": line})


def _collectives(world: World, seconds: float) -> Check:
    """Compare everything; every rank's first fault is reported."""
    if world.size == 1:
        return Check("collectives", None, "one rank has no other to exchange with", "start at least two: -np 2")
    begin = time.monotonic()
    faults: list[str] = []
    done = left_out = 0
    group: tuple[str, int] = ("", 0)
    stop = False
    ours = our_exchanges(world)
    for case in cases(world.size):
        if (case.kind, case.elements) != group and not stop:
            if case.elements != group[1]:
                _progress(world, f"collectives of {case.elements:,} elements")
            group = case.kind, case.elements
            over = time.monotonic() - begin > seconds
            stop = bool(all_gather_json(world, "proof/time", over)[0])  # rank 0's clock counts for all
        if stop:
            left_out += 1
            continue
        fault = check(case, world, ours)
        done += 1
        if fault:
            faults.append(fault)
    gathered = all_gather_json(world, "proof/faults", faults[:1])
    wrong = [f"rank {rank}: {first[0]}" for rank, first in enumerate(gathered) if first]
    if wrong:
        return Check(
            "collectives", False, "; ".join(wrong[:3]),
            "a network that changes what it carries, or memory that does: try the hosts pair by pair",
        )  # fmt: skip
    rest = f"; {left_out} larger ones left out to keep the time" if left_out else ""
    return Check("collectives", True, f"{done} exchanges equal to a local computation{rest}")


def _rate_between_hosts(world: World, expected: float) -> float | None:
    """Return bits a second each host sends in an all-reduce of one rank a host; None on one host."""
    hosts = all_gather_json(world, "proof/leaders", world.local_rank)
    leaders = [rank for rank, local_rank in enumerate(hosts) if local_rank == 0]
    if len(leaders) < 2:
        return None
    _progress(world, f"the rate between {len(leaders)} hosts")
    connections = Connections(world)
    found: float | None = None
    if world.rank in leaders:
        passes = 2 * (len(leaders) - 1) / len(leaders)
        wanted = TRANSFER_SECONDS * (expected or 1e9) / 8 / passes
        count = int(min(MOST_BYTES, max(LEAST_BYTES, wanted))) // 4
        tensor, run = torch.zeros(count), make_sums(connections, leaders, world.rank)
        taken = []
        for _ in range(ROUNDS):
            run(torch.zeros(len(leaders)))  # they begin together
            start = time.perf_counter()
            run(tensor)
            taken.append(time.perf_counter() - start)
        found = passes * 4 * count * 8 / statistics.median(taken[1:])
    # The step ends with the slowest.
    rates = [float(rate) for rate in all_gather_json(world, "proof/rate", found) if rate is not None]
    return min(rates)


def _training(world: World, end: float) -> list[Check]:
    """Train a small model on this package's own demo text until `end`, then verify all."""
    torch.manual_seed(0)
    training, _ = load_text(context=CONTEXT)
    model: nn.Module = LanguageModel(width=64, depth=2, heads=4, context=CONTEXT).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(DataLoader(training, batch_size=BATCH, shuffle=True), seed=0)
    losses: list[float] = []
    batch: Any = None
    while True:
        for inputs, targets in loader:
            batch = (inputs, targets)
            optimizer.zero_grad()
            logits = model(inputs.to(world.device))
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.to(world.device).flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) % AGREE_STEPS == 0:
                enough = len(losses) >= LEAST_STEPS and time.monotonic() >= end
                over = bool(all_gather_json(world, "proof/steps", enough)[0])
                _progress(world, f"training: step {len(losses)}, loss {losses[-1]:.3f}")
                if over:
                    return [_learned(losses), *fd.verify(model, optimizer, batch=batch, losses=losses).checks]


def _learned(losses: list[float]) -> Check:
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    learned = math.isfinite(last) and last < first
    answer = f"{len(losses)} steps, loss from {first:.3f} to {last:.3f}"
    return Check(
        "training", learned, answer, "" if learned else "the gradients that arrive are not those that were sent"
    )


# Every kind of collective, in several sizes and types, against what one process computes alone.
#
# Every rank makes the inputs of all ranks from their numbers, so each can compute what it must receive. Inputs are
# small whole numbers: sums are exact in every type, and the comparison is for equality.


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


if __name__ == "__main__":
    main()

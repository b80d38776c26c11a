"""One rank of ``farandole bench collectives``: every route in turn, interleaved; rank 0 writes the samples."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.world.world import World
from ..train.session import init
from .collectives import ROUTES, Run
from .intervals import NotMeasurable, sent_bytes

_REPEATED_BYTES = 4 * 2**20
_MOST_REPEATS = 32


def main() -> None:
    """Run this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", required=True, help="bytes, with commas")
    parser.add_argument("--routes", required=True)
    parser.add_argument("--operations", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    world = init(device="cpu")
    cases: list[dict[str, Any]] = []
    absent: list[dict[str, str]] = []
    for operation in arguments.operations.split(","):
        runs = _make(operation, arguments.routes.split(","), world, absent)
        for size in map(int, arguments.sizes.split(",")):
            if world.rank == 0:
                sys.stderr.write(f"{operation} of {size} bytes\n")
            # The same elements on all ranks, and a whole number of them in each part.
            count = max(1, -(-size // (4 * world.size))) * world.size
            samples = _measure(runs, count, arguments.rounds, world, arguments.loopback)
            cases += [
                {"operation": operation, "size_bytes": 4 * count, "route": route, **values}
                for route, values in samples.items()
            ]
    if world.rank == 0:
        Path(arguments.output).write_text(json.dumps({"cases": cases, "absent": absent}))


def _make(operation: str, names: Sequence[str], world: World, absent: list[dict[str, str]]) -> dict[str, Run]:
    """Return the routes that run here and give the right answer; note the others in `absent`."""
    runs: dict[str, Run] = {}
    for name in names:
        reason = ""
        try:
            run = ROUTES[name].make(operation, world)
            if not _is_right(operation, run, world):
                reason = f"{operation} gave a wrong result"
        except (NotMeasurable, NotImplementedError, RuntimeError, ValueError) as problem:
            reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        # No rank measures what another cannot run.
        gathered: list[Any] = [None] * world.size
        dist.all_gather_object(gathered, reason)
        reasons = [text for text in gathered if text]
        if reasons:
            absent.append({"operation": operation, "route": name, "reason": reasons[0]})
        else:
            runs[name] = run
    return runs


def _is_right(operation: str, run: Run, world: World) -> bool:
    rows = torch.arange(4.0 * world.size).view(world.size, 4)
    if operation == "all_gather":
        mine = torch.zeros(world.size, 4)
        mine[world.rank] = rows[world.rank]
        return torch.equal(run(mine.view(-1)), rows.view(-1))
    total = rows * world.size + sum(range(world.size))
    result = run((rows + world.rank).view(-1))
    return torch.equal(result, (total if operation == "all_reduce" else total[world.rank]).reshape(-1))


def _measure(
    runs: dict[str, Run], count: int, rounds: int, world: World, loopback: bool
) -> dict[str, dict[str, list[float]]]:
    """Return seconds (the slowest rank's) and bytes a host or rank has sent, of each route and round."""
    if not runs:
        return {}
    repeats = max(1, min(_MOST_REPEATS, _REPEATED_BYTES // (4 * count)))
    order = list(runs)
    rows: list[list[list[float]]] = [[] for _ in order]
    for round_ in range(-1, rounds):
        for i in range(len(order)) if round_ % 2 else reversed(range(len(order))):
            row = _sample(runs[order[i]], count, repeats, loopback)
            if round_ >= 0:  # the first one warms up
                rows[i].append(row)
    mine = torch.tensor(rows, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    together = torch.stack(everyone).amax(0)
    share = world.size if loopback else 1  # the loopback has carried all ranks' bytes
    return {
        name: {"seconds": together[i, :, 0].tolist(), "sent_bytes": (together[i, :, 1] / share).tolist()}
        for i, name in enumerate(order)
    }


def _sample(run: Run, count: int, repeats: int, loopback: bool) -> list[float]:
    tensor = torch.zeros(count)
    dist.barrier()
    sent = sent_bytes(loopback=loopback)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        run(tensor)
    seconds = time.perf_counter() - begin
    dist.barrier()
    return [seconds / repeats, (sent_bytes(loopback=loopback) - sent) / repeats]


if __name__ == "__main__":
    main()

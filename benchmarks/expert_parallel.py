"""Experts over ranks: the all-to-all of a mixture-of-experts layer beside the link's bound and beside gloo.

    farandole emulate --hosts 2 --rate 1gbit -- python benchmarks/expert_parallel.py --gigabits 1

Each rank sends a layer's tokens to the experts of all ranks: `--tokens` of width `--hidden`, each for two of
eight experts, chosen at random, so that pieces are unequal. A sample is one all-to-all of these rows as the layer
makes it. The same rows go by gloo's all-to-all, by turns A B B A. A sample's time is that of its slowest rank. The
bound is the bytes that the host with most of them sends or receives, over the rate of its link, without headers.
Printed are medians, and the bound over the median with the lowest and highest of the samples. Then the same for a
layer's forward and backward pass: four all-to-alls, with the arithmetic of its experts between them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist

import farandole as fd
import farandole.backend
from farandole.parallel.expert.expert_ranks import ExpertRanks
from farandole.parallel.expert.layer import MixtureOfExperts
from farandole.parallel.expert.row_codec import ROW_CODECS

EXPERTS, TOP_K = 8, 2


def slowest(calls: dict[str, Callable[[], object]], samples: int) -> dict[str, list[float]]:
    """Return the seconds of each sample of each call, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(samples + 1):
        for name in calls if sample % 2 else reversed(calls):
            dist.barrier()
            begin = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - begin)
    found = {}
    for name, values in times.items():
        tensor = torch.tensor(values[1:], dtype=torch.float64)  # the first warms up
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        found[name] = tensor.tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6144, help="of a rank")
    parser.add_argument("--hidden", type=int, default=1024, help="width of a token")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--codec", default="none", help="of rows: none, bf16 or int8")
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second, of each host's link, for the bound")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = fd.init()
    group, gloo = world.new_group(backend="farandole"), world.new_group(backend="gloo")
    assert group is not None, "several ranks"
    codec = ROW_CODECS[arguments.codec]
    ranks = ExpertRanks(world, group, group, tuple(range(world.size)), world.rank, codec)
    torch.manual_seed(world.rank)
    rows = torch.randn(arguments.tokens * TOP_K, arguments.hidden)
    target = torch.randint(world.size, (rows.shape[0],))
    sent = torch.bincount(target, minlength=world.size)
    table = [torch.empty_like(sent) for _ in range(world.size)]
    dist.all_gather(table, sent)
    counts = torch.stack(table)
    received = counts[:, world.rank].tolist()
    away = counts - counts.diag().diag()
    busiest_rows = int(torch.maximum(away.sum(0), away.sum(1)).max())
    wire_bytes = busiest_rows * codec.room(rows[:1]).nbytes
    bound = wire_bytes / (arguments.gigabits * 1e9 / 8)

    out = torch.empty(sum(received), arguments.hidden)
    calls = {
        "farandole": lambda: ranks.swap("benchmark", rows.split(sent.tolist()), out.split(received)),
        "gloo": lambda: dist.all_to_all_single(out, rows, received, sent.tolist(), group=gloo),
    }
    found = slowest(calls, arguments.samples)
    facts: dict[str, Any] = {"ranks": world.size, "codec": arguments.codec, "wire_mb": round(wire_bytes / 1e6, 2)}
    for name, times in found.items():
        own_bound = (
            bound if name == "farandole" else busiest_rows * arguments.hidden * 4 * 8e-9 / arguments.gigabits
        )
        report(world, {"part": f"all-to-all, {name}", **facts, **shares(own_bound, times)})

    layer = MixtureOfExperts(arguments.hidden, 64, num_experts=EXPERTS, top_k=TOP_K)
    layer.last.ranks = ranks
    for parameter in layer.experts.parameters():
        parameter.data = parameter.data.chunk(world.size)[world.rank].clone()
    tokens = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)

    def step() -> None:
        layer(tokens).sum().backward()

    times = slowest({"layer": step}, max(2, arguments.samples // 3))["layer"]
    seconds = layer.last.load.seconds if layer.last.load is not None else None
    busy = None if seconds is None else round(1e3 * (seconds.forward + seconds.backward), 1)
    passes = {"part": "a layer's forward and backward pass", "experts_compute_ms": busy}
    report(world, {**passes, **facts, **shares(4 * bound, times)})


def shares(bound: float, times: list[float]) -> dict[str, Any]:
    """Return the median in ms and the bound's share of it."""
    middle = statistics.median(times)
    lowest, highest = bound / max(times), bound / min(times)
    return {
        "bound_ms": round(1e3 * bound, 1),
        "median_ms": round(1e3 * middle, 1),
        "share_of_bound": round(bound / middle, 3),
        "range": [round(lowest, 3), round(highest, 3)],
    }


def report(world: fd.World, found: dict[str, Any]) -> None:
    """Print a line on rank 0."""
    if world.rank == 0:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        print(json.dumps({**found, "machine": machine, "date": date.today().isoformat()}), flush=True)


if __name__ == "__main__":
    main()

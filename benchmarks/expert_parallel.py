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

import statistics
from typing import Any

import torch
import torch.distributed as dist

import farandole as fd
import farandole.backend
from farandole.parallel.expert.expert_ranks import ROW_CODECS, ExpertRanks
from farandole.parallel.expert.layer import MixtureOfExperts
from models import step_of
from shared import link_seconds, median_ms, read_options, report, slowest_in_turns

EXPERTS, TOP_K = 8, 2


def main() -> None:
    arguments = read_options(
        __doc__,
        tokens=(6144, "of a rank"),
        hidden=(1024, "width of a token"),
        samples=12,
        codec=("none", "of rows: none, bf16 or int8"),
        gigabits=(1.0, "a second, of each host's link, for the bound"),
    )
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
    bounds = {
        "farandole": link_seconds(wire_bytes, arguments.gigabits),
        "gloo": link_seconds(busiest_rows * arguments.hidden * 4, arguments.gigabits),
    }

    out = torch.empty(sum(received), arguments.hidden)
    calls = {
        "farandole": lambda: ranks.swap("benchmark", rows.split(sent.tolist()), out.split(received)),
        "gloo": lambda: dist.all_to_all_single(out, rows, received, sent.tolist(), group=gloo),
    }
    facts: dict[str, Any] = {"ranks": world.size, "codec": arguments.codec, "wire_mb": round(wire_bytes / 1e6, 2)}
    for name, times in slowest_in_turns(calls, arguments.samples).items():
        report({"part": f"all-to-all, {name}", **facts, **shares(bounds[name], times)})

    layer = MixtureOfExperts(arguments.hidden, 64, num_experts=EXPERTS, top_k=TOP_K)
    layer.last.ranks = ranks
    for parameter in layer.experts.parameters():
        parameter.data = parameter.data.chunk(world.size)[world.rank].clone()
    tokens = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)

    step = step_of(layer, lambda model: model(tokens).sum())
    times = slowest_in_turns({"layer": step}, max(2, arguments.samples // 3))["layer"]
    seconds = layer.last.load.seconds if layer.last.load is not None else None
    busy = None if seconds is None else round(1e3 * (seconds.forward + seconds.backward), 1)
    passes = {"part": "a layer's forward and backward pass", "experts_compute_ms": busy}
    report({**passes, **facts, **shares(4 * bounds["farandole"], times)})


def shares(bound: float, times: list[float]) -> dict[str, Any]:
    """Return the median in ms and the bound's share of it."""
    return {
        "bound_ms": round(1e3 * bound, 1),
        "median_ms": median_ms(times),
        "share_of_bound": round(bound / statistics.median(times), 3),
        "range": [round(bound / max(times), 3), round(bound / min(times), 3)],
    }


if __name__ == "__main__":
    main()

"""A transformer block on the ranks of one host: tensor parallel, DTensor's own over gloo, and one rank alone.

    farandole run -np 2 --quiet -- python benchmarks/tensor_parallel.py

Width 1024, 512 tokens, 16 heads, float32, forward and backward, one thread a rank. ``ours`` is the plan key
`tensor`; ``stock`` is `torch.distributed.tensor.parallel.parallelize_module` over gloo; ``stock, our
backend`` the same over the backend "farandole". They take turns sample by sample; a sample's time is that of
the slowest rank. Before and after them rank 0 alone computes the whole block, while the others wait in the
kernel. Printed are medians in ms, the ratios of neighbours in time with a 95 % bootstrap interval, and the
collectives of one step of ``ours`` beside the formula: two sums of one activation forward and two backward
(Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from interleaved import paired  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import farandole as fd
import farandole.backend
from farandole.parallel.model import DistributedModel

WIDTH, TOKENS, HEADS = 1024, 512, 16
NAMES = ("query", "key", "value", "up")
RECIPE = {**dict.fromkeys(NAMES, "columns"), "out": "rows", "down": "rows"}


class Block(nn.Module):
    """Attention and a two-layer perceptron; `heads` are those of this rank."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        normed = self.norms[0](x)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return out


def step_of(block: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        block.zero_grad()
        block(x).square().mean().backward()

    return step


def stock(group: Any, x: torch.Tensor) -> Callable[[], None]:
    torch.manual_seed(0)
    plan: Any = {**dict.fromkeys(NAMES, ColwiseParallel()), "out": RowwiseParallel(), "down": RowwiseParallel()}
    block = Block(HEADS // group.size())
    return step_of(parallelize_module(block, DeviceMesh.from_group(group, "cpu"), plan), x)


def alone(step: Callable[[], None], samples: int, world: Any) -> list[float]:
    """Return the seconds of steps of rank 0; the others wait for a key of the store, without computing."""
    seconds = []
    if world.rank == 0:
        step()
        for _ in range(samples):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
    topic = world.topic("alone")
    if world.rank == 0:
        world.store.set(topic, "over")
    world.store.wait([topic])
    return seconds


def in_turns(steps: dict[str, Callable[[], None]], samples: int) -> dict[str, list[float]]:
    """Return the seconds of each step on the slowest rank, in turns A B C C B A."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for sample in range(samples + 1):
        for name in steps if sample % 2 else reversed(steps):
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - begin)
    slowest = {}
    for name, values in times.items():
        tensor = torch.tensor(values[1:], dtype=torch.float64)  # the first warms up
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        slowest[name] = tensor.tolist()
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--only-ours", action="store_true", help="no stock contenders")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own, of its older names
    world: Any = fd.init()
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    torch.manual_seed(0)
    whole = Block(HEADS)
    torch.manual_seed(0)
    block = Block(HEADS)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    fd.distribute(block, optimizer, fd.Plan(tensor=world.size, tensor_recipe=RECIPE))
    steps = {"ours": step_of(block, x)}
    if not arguments.only_ours:
        farandole.backend.register()
        steps["stock"] = stock(dist.new_group(backend="gloo"), x)
        steps["stock, our backend"] = stock(dist.new_group(backend="farandole"), x)
    steps["ours"]()
    proofs = DistributedModel.of(block).proofs
    assert proofs is not None, "the block is split"
    proofs.ranks.calls.clear()
    proofs.ranks.bytes.clear()
    steps["ours"]()
    calls, nbytes = dict(proofs.ranks.calls), dict(proofs.ranks.bytes)

    before = alone(step_of(whole, x), arguments.samples // 2, world)
    times = in_turns(steps, arguments.samples)
    after = alone(step_of(whole, x), arguments.samples // 2, world)
    if world.rank:
        return
    medians = {name: round(1e3 * statistics.median(values), 2) for name, values in times.items()}
    single = round(1e3 * statistics.median(before + after), 2)
    found: dict[str, Any] = {"median_ms": {"one rank": single, **medians}}
    found["one rank over ours"] = round(single / medians["ours"], 3)
    found["one rank, before and after, ms"] = [round(1e3 * statistics.median(each), 2) for each in (before, after)]
    for name in steps:
        if name != "ours":
            ratio, interval = paired(times[name], times["ours"])
            found[f"{name} over ours"] = [ratio, interval]
    found["collectives of a step"] = {"calls": calls, "bytes": nbytes}
    found["formula"] = {"all_reduce": 4, "bytes": 4 * x.nbytes}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

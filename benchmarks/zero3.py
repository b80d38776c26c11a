"""ZeRO stage 3 of `fd.distribute` beside stock FSDP2 on gloo, interleaved in one run on one network.

    farandole emulate --hosts 4 --rate 1gbit -- python benchmarks/zero3.py --gigabits 1

Contenders, with the same units and the same optimizer:

- ``fsdp2``: torch's `fully_shard` of each block and of the model, on a gloo group;
- ``exact``: ``Plan(zero=3)``;
- ``int8``: ``Plan(zero=3, codec="int8", weight_codec="int8")``.

Blocks sleep instead of computing, so that more ranks than cores can be measured; packing is real work. They take
turns sample by sample, A B C, C B A. A sample's time is that of its slowest rank. Printed, and with `--out`
written as JSON: medians in ms, and the median of fsdp2's time over each other's, by neighbours in time, with a
95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interleaved import paired  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import farandole as fd
from farandole.parallel.blocks import repeated_blocks

STOCK = "fsdp2"
PLANS = {
    "exact": fd.Plan(zero=3),
    "int8": fd.Plan(zero=3, codec="int8", weight_codec="int8"),
}


class Blocks(nn.Module):
    """Blocks one after the other, as the layers of a transformer."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        elements = int(arguments.million * 1e6 / arguments.blocks) // 1024
        seconds = arguments.compute_seconds / arguments.blocks / 3
        self.blocks = nn.ModuleList(Block(elements, seconds) for _ in range(arguments.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """A layer that sleeps, with a matrix of rows of 1024 elements."""

    def __init__(self, rows: int, seconds: float) -> None:
        super().__init__()
        self.layer = SleepingLayer(rows, seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return the same shape."""
        out: torch.Tensor = self.layer(x)
        return out


class SleepingLayer(nn.Module):
    """A matrix whose arithmetic is sleep, and whose gradient lies in memory as a real one does."""

    def __init__(self, rows: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 1024) / 32)
        self.gradient = torch.randn(rows, 1024) / 32
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return the same shape."""
        out: torch.Tensor = _Sleep.apply(x, self.weight, self.gradient, self.seconds)
        return out


class _Sleep(torch.autograd.Function):
    """Lets time pass as a layer's arithmetic would: once forward and twice as long backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.seconds, ctx.gradient = seconds, gradient
        time.sleep(seconds)
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], ctx.gradient, None, None


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    x = torch.ones(4)

    def step() -> None:
        optimizer.zero_grad()
        model(x.requires_grad_()).square().mean().backward()
        optimizer.step()

    return step


def contenders(arguments: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Callable[[], None]]:
    """Return a step of each."""
    torch.manual_seed(0)
    stock = Blocks(arguments)
    mesh = DeviceMesh.from_group(group, "cpu")
    for _, block in repeated_blocks(stock):
        fully_shard(block, mesh=mesh)
    fully_shard(stock, mesh=mesh)
    steps = {STOCK: step_of(stock, torch.optim.SGD(stock.parameters(), 1e-4))}
    for name in arguments.only or PLANS:
        model = Blocks(arguments)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        fd.distribute(model, optimizer, PLANS[name])
        steps[name] = step_of(model, optimizer)
    return steps


def measure(steps: dict[str, Callable[[], None]], samples: int) -> dict[str, list[float]]:
    """Return the seconds of the samples of each, of the slowest rank."""
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


def report(found: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    facts: dict[str, object] = {
        "ranks": dist.get_world_size(),
        "million_parameters": arguments.million,
        "blocks": arguments.blocks,
        "compute_ms": 1e3 * arguments.compute_seconds,
        "samples": arguments.samples,
        "median_ms": {name: round(1e3 * statistics.median(values), 1) for name, values in found.items()},
    }
    if arguments.gigabits:
        hosts = fd.world().node_count
        # Every parameter is gathered twice and its gradient scattered once; a host sends what others have not.
        sent = 3 * arguments.million * 1e6 * 4 * (hosts - 1) / hosts
        facts["exact_wire_bound_ms"] = round(1e3 * sent / (arguments.gigabits * 1e9 / 8), 1)
    for name, values in found.items():
        if name != STOCK:
            ratio, interval = paired(found[STOCK], values)
            facts[f"{STOCK}_over_{name}"] = {"ratio": ratio, "interval": interval}
    facts["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    facts["date"] = date.today().isoformat()
    print(json.dumps(facts), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=sorted(PLANS), help="beside fsdp2")
    parser.add_argument("--gigabits", type=float, default=0.0, help="a second, of each host's link, for the bound")
    parser.add_argument("--million", type=float, default=13.0, help="parameters of the model")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--compute-seconds", type=float, default=0.15, help="a step")
    parser.add_argument("--out", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's own, of its older names
    torch.set_num_threads(1)
    fd.init()
    group = dist.new_group(backend="gloo")
    found = measure(contenders(arguments, group), arguments.samples)
    if dist.get_rank() == 0:
        report(found, arguments)
    dist.barrier()
    dist.destroy_process_group(group)
    fd.shutdown()


if __name__ == "__main__":
    main()

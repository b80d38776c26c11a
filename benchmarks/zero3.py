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
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import farandole as fd
from farandole.parallel.blocks import repeated_blocks
from models import SleepingLayer, mean_square_loss, step_of
from shared import medians_ms, paired, read_options, report, slowest_in_turns, stage_3_bound_ms

STOCK = "fsdp2"
PLANS = {
    "exact": fd.Plan(zero=3),
    "int8": fd.Plan(zero=3, codec="int8", weight_codec="int8"),
}


class Blocks(nn.Module):
    """Blocks in a row, as layers of a transformer; their gradients lie in memory as real ones do."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        shape = int(arguments.million * 1e6 / arguments.blocks) // 1024, 1024
        seconds = arguments.compute_seconds / arguments.blocks / 3
        self.blocks = nn.ModuleList(
            nn.Sequential(SleepingLayer(torch.randn(shape) / 32, torch.randn(shape) / 32, seconds))
            for _ in range(arguments.blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


def contenders(arguments: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Callable[[], None]]:
    """Return a step of each."""
    loss_of = mean_square_loss(torch.ones(4, requires_grad=True))
    torch.manual_seed(0)
    stock = Blocks(arguments)
    mesh = DeviceMesh.from_group(group, "cpu")
    for _, block in repeated_blocks(stock):
        fully_shard(block, mesh=mesh)
    fully_shard(stock, mesh=mesh)
    steps = {STOCK: step_of(stock, loss_of, torch.optim.SGD(stock.parameters(), 1e-4))}
    for name in arguments.only or PLANS:
        model = Blocks(arguments)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        fd.distribute(model, optimizer, PLANS[name])
        steps[name] = step_of(model, loss_of, optimizer)
    return steps


def main() -> None:
    arguments = read_options(
        __doc__,
        samples=9,
        only=([str], "beside fsdp2", sorted(PLANS)),
        gigabits=(0.0, "a second, of each host's link, for the bound"),
        million=(13.0, "parameters of the model"),
        blocks=6,
        compute_seconds=(0.15, "a step"),
        out=(Path, "write the figures there"),
    )
    warnings.simplefilter("ignore")  # torch's own, of its older names
    torch.set_num_threads(1)
    world = fd.init()
    group = dist.new_group(backend="gloo")
    times = slowest_in_turns(contenders(arguments, group), arguments.samples)
    found: dict[str, object] = {
        "ranks": world.size,
        "million_parameters": arguments.million,
        "blocks": arguments.blocks,
        "compute_ms": 1e3 * arguments.compute_seconds,
        "samples": arguments.samples,
        "median_ms": medians_ms(times),
    }
    if arguments.gigabits:
        parameters = 1e6 * arguments.million
        found["exact_wire_bound_ms"] = stage_3_bound_ms(parameters, world.node_count, arguments.gigabits)
    for name in [each for each in times if each != STOCK]:
        ratio, interval = paired(times[STOCK], times[name])
        found[f"{STOCK}_over_{name}"] = {"ratio": ratio, "interval": interval}
    report(found, out=arguments.out)
    dist.barrier()
    dist.destroy_process_group(group)
    fd.shutdown()


if __name__ == "__main__":
    main()

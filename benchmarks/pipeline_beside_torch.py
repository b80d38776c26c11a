"""A pipeline of two computing ranks: `fd.step` beside torch's own `Schedule1F1B` and `ScheduleGPipe` over gloo.

    farandole run -np 2 --quiet -- python benchmarks/pipeline_beside_torch.py

Eight blocks of a transformer (width 256, 128 tokens), float32, a batch of 32 in 8 micro-batches, one thread a
rank, the same cut in the middle. They take turns sample by sample, in turns A B C C B A; a sample is one forward
and backward of the batch, and its time is that of the slowest rank. Printed are medians in ms and the ratio of
ours to torch's, neighbours in time, with a 95 % bootstrap interval. Gradients are compared before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import farandole as fd
from models import mean_square
from shared import medians_ms, paired, read_options, report, slowest_in_turns

WIDTH, TOKENS, BATCH, LAYERS = 256, 128, 32, 8


def make_model() -> nn.Sequential:
    """Return the blocks, alike on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        ]
    )


def stock(
    schedule: Any, count: int, world: Any, x: torch.Tensor, y: torch.Tensor
) -> tuple[nn.Module, Callable[[], None]]:
    """Return this rank's half of the model and how torch trains it."""
    half = LAYERS // world.size
    part = make_model()[half * world.rank : half * (world.rank + 1)]
    group = dist.new_group(backend="gloo")
    stage = PipelineStage(part, world.rank, world.size, torch.device("cpu"), group=group)
    runner = schedule(stage, count, loss_fn=mean_square)

    def step() -> None:
        part.zero_grad()
        if world.rank == 0:
            runner.step(x)
        else:
            runner.step(target=y, losses=[])

    return part, step


def main() -> None:
    arguments = read_options(__doc__, micro_batches=8, samples=30)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own, of its older names
    world: Any = fd.init()
    count = arguments.micro_batches
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, TOKENS, WIDTH, generator=generator) for _ in range(2))
    steps: dict[str, Callable[[], None]] = {}
    parts: dict[str, nn.Module] = {}
    for name, schedule in {"torch, gpipe": ScheduleGPipe, "torch, 1f1b": Schedule1F1B}.items():
        parts[name], steps[name] = stock(schedule, count, world, x, y)
    for kind in ("gpipe", "1f1b"):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = fd.Plan(pipeline=world.size, schedule=kind, micro_batches=count, pipeline_cuts=(str(LAYERS // 2),))
        model, optimizer = fd.distribute(model, optimizer, plan)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            fd.step(model, mean_square, x, y)

        parts[f"ours, {kind}"], steps[f"ours, {kind}"] = model, step
    for step_once in steps.values():
        step_once()
    gradients = {
        name: torch.cat([p.grad.flatten() for p in part.parameters() if p.numel() and p.grad is not None])
        for name, part in parts.items()
    }
    reference = gradients["torch, 1f1b"]
    differences = {name: float((each - reference).abs().max()) for name, each in gradients.items()}
    times = slowest_in_turns(steps, arguments.samples)
    ratios = {kind: paired(times[f"ours, {kind}"], times[f"torch, {kind}"]) for kind in ("gpipe", "1f1b")}
    report(
        {
            "micro_batches": count,
            "median_ms": medians_ms(times),
            "gradients differ from torch's 1f1b by": differences,
            **{f"{kind}: ours over torch's": ratio for kind, ratio in ratios.items()},
        },
        indent=1,
    )


if __name__ == "__main__":
    main()

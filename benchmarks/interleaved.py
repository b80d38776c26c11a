"""Trainers of one model side by side in one process: the models, the turns they take, and ratios of neighbours."""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.bench.models.language import LanguageModel
from farandole.bench.models.resnet import resnet50

WIDTH = 16
Loss = Callable[[nn.Module], torch.Tensor]
Trainers = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]


class ManySmall(nn.Module):
    """Very many small parameters, so that the cost of each gradient is all overhead.

    `parameters` tensors of 16 x 16 and 16 numbers; takes and returns (batch, 16).

    The last layer of an odd number has no bias.
    """

    def __init__(self, parameters: int = 2000) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=i + 1 < parameters) for i in range(0, parameters, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what each layer makes of the input: wide, so that no gradient vanishes on its way."""
        outputs = [layer(x) for layer in self.layers]
        return torch.stack(outputs).mean(0)


def argument_parser(description: str, model: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that takes `model` when none is named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["lm", "resnet50", "small"], default=model)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1, help="steps a block")
    return parser


def build(name: str) -> tuple[Callable[[], nn.Module], Loss]:
    """Return how to make the model, and its loss on a fixed input of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    if name == "lm":
        tokens = torch.randint(0, 256, (16, 129), generator=generator)

        def language_loss(model: nn.Module) -> torch.Tensor:
            return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        return lambda: LanguageModel(width=128, depth=4, heads=4, context=128), language_loss
    if name == "resnet50":
        images = torch.randn(4, 3, 160, 160, generator=generator)
        labels = torch.randint(0, 1000, (4,), generator=generator)
        return resnet50, lambda model: nn.functional.cross_entropy(model(images), labels)
    rows = torch.randn(8, 16, generator=generator)
    return lambda: ManySmall(2000), lambda model: model(rows).square().mean()


def time_in_turns(
    trainers: Trainers,
    loss_of: Loss,
    arguments: argparse.Namespace,
    *,
    before: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of every step of each trainer, on the rank that took longest, in blocks A B B A.

    `before` is called with the name of the trainer whose block comes. The first round is warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in trainers}

    def block(name: str) -> None:
        model, optimizer = trainers[name]
        if before is not None:
            before(name)
        for _ in range(arguments.steps):
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            times[name].append(time.perf_counter() - begin)

    order = list(trainers)
    for round_ in range(arguments.rounds + 1):
        for name in order if round_ % 2 else reversed(order):
            block(name)
        if round_ == 0:
            times = {name: [] for name in trainers}
    slowest = {}
    for name, values in times.items():
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        slowest[name] = tensor.tolist()
    return slowest


def paired(a: list[float], b: list[float]) -> tuple[float, list[float]]:
    """Return the median of a / b, step by step in time, and its 95 % bootstrap interval.

    Neighbours in time share the machine's mood, so their ratio is steadier than the ratio of medians.
    """
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return round(statistics.median(ratios), 4), [round(medians[49], 4), round(medians[1949], 4)]


def describe(model: str, slowest: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return what was measured, where and when, and each trainer's median."""
    return {
        "model": model,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, torch {torch.__version__}, {dist.get_world_size()} ranks, "
        f"{torch.get_num_threads()} thread(s) each",
        "steps": len(next(iter(slowest.values()))),
        "median_ms": {name: round(1e3 * statistics.median(values), 3) for name, values in slowest.items()},
    }

"""Step time of the engine beside stock DistributedDataParallel, interleaved in one run.

    farandole run -np 2 --quiet -- python benchmarks/engine_vs_ddp.py --model small

Both train a copy of one model on the same input, in blocks A B B A, on ranks bound to their cores. A
step's time is that of its slowest rank. Printed are medians, and the ratio of neighbours in time with a
bootstrap interval;
"unrecorded" is the engine with recording off, which gives the cost of recording.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.bench.models.language import LanguageModel
from farandole.bench.models.resnet import resnet50
from farandole.bench.models.small import ManySmall
from farandole.core.events import NullRecorder

Loss = Callable[[nn.Module], torch.Tensor]


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


def paired(a: list[float], b: list[float]) -> tuple[float, list[float]]:
    """Return the median of a / b, step by step in time, and its 95 % bootstrap interval.

    Neighbours in time share the machine's mood, so their ratio is steadier than the ratio of medians.
    """
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return round(statistics.median(ratios), 4), [round(medians[49], 4), round(medians[1949], 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["lm", "resnet50", "small"], default="small")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1, help="steps a block")
    arguments = parser.parse_args()
    world = fd.init()
    recorder = world.recorder
    make, loss_of = build(arguments.model)
    trainers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for name in ("farandole", "unrecorded", "ddp"):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        if name == "ddp":
            model = DistributedDataParallel(model)
        else:
            fd.distribute(model, optimizer)
        trainers[name] = (model, optimizer)

    times: dict[str, list[float]] = {name: [] for name in trainers}

    def block(name: str) -> None:
        model, optimizer = trainers[name]
        world.recorder = NullRecorder() if name == "unrecorded" else recorder
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
            times = {name: [] for name in trainers}  # warm-up
    world.recorder = recorder
    slowest = {}
    for name, values in times.items():
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        slowest[name] = tensor.tolist()
    if world.rank == 0:
        over_ddp, over_interval = paired(slowest["farandole"], slowest["ddp"])
        recorded, recorded_interval = paired(slowest["farandole"], slowest["unrecorded"])
        result = {
            "model": arguments.model,
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, torch {torch.__version__}, {world.size} ranks, "
            f"{torch.get_num_threads()} thread(s) each",
            "steps": len(slowest["ddp"]),
            "median_ms": {name: round(1e3 * statistics.median(v), 3) for name, v in slowest.items()},
            "farandole_over_ddp": over_ddp,
            "interval": over_interval,
            "recorded_over_unrecorded": recorded,
            "recorded_interval": recorded_interval,
        }
        print(json.dumps(result), flush=True)
    trainers.clear()  # the wrapper keeps the group, which must be gone before the process is


if __name__ == "__main__":
    main()

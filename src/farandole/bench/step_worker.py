"""One rank of the step benchmark: trains every contender in turn, interleaved, and rank 0 prints the times.

Started by ``farandole bench step`` on every (emulated) host. A step's time is that of its slowest rank;
bytes are the kernel's counters of this host's link, processor seconds those of this process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import FarandoleError
from ..train.session import init
from .contenders import Contender, DoesNotRun, make_contender
from .models.language import LanguageModel


def lm27() -> tuple[nn.Module, int, int]:
    """Return the 27.4 M-parameter language model, its vocabulary and its context."""
    return LanguageModel(width=512, depth=8, heads=8, context=128, vocabulary=4096), 4096, 128


def main() -> None:
    """Run this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    world = init()
    _, vocabulary, context = lm27()
    generator = torch.Generator().manual_seed(1 + world.rank)
    tokens = torch.randint(0, vocabulary, (arguments.batch, context + 1), generator=generator)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    contenders: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    for name in arguments.contenders.split(";"):
        try:
            contenders[name] = make_contender(name, lambda: lm27()[0], loss_of, partial(torch.optim.SGD, lr=0.05))
        except (DoesNotRun, FarandoleError) as reason:
            absent[name] = str(reason)
    rows: dict[str, list[list[float]]] = {name: [] for name in contenders}
    order = list(contenders)
    for round_ in range(arguments.warm_up + arguments.rounds):
        for name in order if round_ % 2 else reversed(order):
            row = _measure(contenders[name])
            if round_ >= arguments.warm_up:
                rows[name].append(row)
    mine = torch.tensor([rows[name] for name in order], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    if world.rank == 0:
        together = torch.stack(everyone)
        result = {
            "absent": absent,
            "contenders": {
                name: {
                    "seconds": together[:, i, :, 0].amax(0).tolist(),
                    "processor_seconds": together[:, i, :, 1].mean(0).tolist(),
                    "sent_bytes": together[:, i, :, 2].amax(0).tolist(),
                    "loss": together[:, i, :, 3].mean(0).tolist(),
                }
                for i, name in enumerate(order)
            },
        }
        Path(arguments.output).write_text(json.dumps(result))
    contenders.clear()


def _measure(contender: Contender) -> list[float]:
    dist.barrier()
    sent, used, begin = _sent_bytes(), _processor_seconds(), time.perf_counter()
    loss = contender.step()
    seconds = time.perf_counter() - begin
    used = _processor_seconds() - used
    dist.barrier()
    return [seconds, used, float(_sent_bytes() - sent), float(loss)]


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _sent_bytes() -> int:
    """Return what this host has sent over its links so far."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            total += int(numbers.split()[8])
    return total


if __name__ == "__main__":
    main()

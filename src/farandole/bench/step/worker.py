"""One rank of the step benchmark: trains every contender in turn, interleaved, and rank 0 writes the times.

Started by ``farandole bench step`` on every (emulated) host. A step's time is that of its slowest rank;
bytes are the kernel's counters of this host's link, CPU seconds those of this process.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...train.session import init
from ..measure.intervals import NotMeasurable, sent_bytes
from ..measure.machine import has_16_bits
from .contender_names import MODELS, PRECISIONS, Settings
from .contenders import Contender, LossOf, make_contender
from .workloads import WORKS, Work, parameters_of

STEPS_UNTIL_CHOSEN = 4
"""Codec "auto" profiles three steps, and its first step by the new codec makes the buckets."""


def main() -> None:
    """Run this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="lm27")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    world = init()
    work = WORKS[arguments.model]
    generator = torch.Generator().manual_seed(1 + world.rank)
    try:
        batch = tuple(part.to(world.device) for part in work.make_batch(arguments.batch, generator))
    except RuntimeError as problem:  # what torch raises where there is no such memory
        raise ConfigError(
            f"--batch {arguments.batch}: cannot be made for {arguments.model}: {str(problem).splitlines()[0]}",
            remedy="choose a smaller one",
        ) from None

    def loss_of(model: nn.Module) -> torch.Tensor:
        return work.loss(model, batch)

    if world.rank == 0 and world.device.type == "cpu" and arguments.precision != "fp32" and not has_16_bits():
        sys.stderr.write(
            f"this CPU has no instructions for {arguments.precision}: large models take far longer so\n"
        )
    absent: dict[str, str] = {}
    contenders = _make(
        arguments.contenders.split(";"), work, loss_of, world, absent, precision=arguments.precision,
        settings=arguments.settings,
    )  # fmt: skip
    chooses = any(name.startswith("auto") for name in contenders)
    warm_up = max(arguments.warm_up, STEPS_UNTIL_CHOSEN) if chooses else arguments.warm_up
    rows = _train(contenders, warm_up, arguments.rounds, world, arguments.loopback)
    everyone = [torch.empty_like(rows) for _ in range(world.size)]
    if contenders:
        dist.all_gather(everyone, rows)
    if world.rank == 0:
        together = torch.stack(everyone)
        share = world.size if arguments.loopback else 1  # the loopback has carried all ranks' bytes
        result = {
            "absent": absent,
            "device": str(world.device),
            "parameters": parameters_of(arguments.model),
            "contenders": {
                name: {
                    "seconds": together[:, i, :, 0].amax(0).tolist(),
                    "processor_seconds": together[:, i, :, 1].mean(0).tolist(),
                    "sent_bytes": (together[:, i, :, 2].amax(0) / share).tolist(),
                    "loss": together[:, i, :, 3].mean(0).tolist(),
                }
                for i, name in enumerate(contenders)
            },
        }
        Path(arguments.output).write_text(json.dumps(result))
    contenders.clear()  # wrappers keep groups, which must be gone before the process is


def _make(
    names: list[str], work: Work, loss_of: LossOf, world: World, absent: dict[str, str], *, precision: str,
    settings: Settings,
) -> dict[str, Contender]:  # fmt: skip
    """Return the contenders that train a first step on every rank; note the others in `absent`."""
    made: dict[str, Contender] = {}
    for name in names:
        reason = ""
        contender = None
        try:
            contender = make_contender(
                name,
                lambda: work.make().to(world.device),
                loss_of,
                partial(torch.optim.SGD, lr=0.05),
                settings,
            )
            contender.train_in(precision, world.device.type)
            torch.manual_seed(0)
            contender.step()
        except (NotMeasurable, FarandoleError, RuntimeError, ValueError, NotImplementedError) as problem:
            reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        reasons = [text for text in all_gather_json(world, "contenders", reason) if text]
        if reasons or contender is None:
            absent[name] = reasons[0]
        else:
            made[name] = contender
        if world.rank == 0:
            sys.stderr.write(f"{name}: {absent.get(name, 'trains')}\n")
    return made


def _train(
    contenders: dict[str, Contender], warm_up: int, rounds: int, world: World, loopback: bool
) -> torch.Tensor:
    """Return (contender, round, what): this rank's seconds, CPU seconds, sent bytes and loss."""
    order = list(contenders)
    rows: dict[str, list[list[float]]] = {name: [] for name in order}
    for round_ in range(warm_up + rounds):
        for name in order if round_ % 2 else reversed(order):
            torch.manual_seed(1 + round_)  # all drop out the same, or losses would differ by that
            row = _measure(contenders[name], loopback)
            if round_ >= warm_up:
                rows[name].append(row)
        if world.rank == 0:
            what = f"round {round_ - warm_up + 1} of {rounds}" if round_ >= warm_up else "warm-up"
            sys.stderr.write(f"{what} is done\n")
    return torch.tensor([rows[name] for name in order], dtype=torch.float64).view(len(order), rounds, 4)


def _measure(contender: Contender, loopback: bool) -> list[float]:
    dist.barrier()
    sent = sent_bytes(loopback=loopback)
    dist.barrier()
    used, begin = _processor_seconds(), time.perf_counter()
    loss = float(contender.step())  # on a GPU: waits until the step is done
    seconds = time.perf_counter() - begin
    used = _processor_seconds() - used
    dist.barrier()
    return [seconds, used, float(sent_bytes(loopback=loopback) - sent), loss]


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()

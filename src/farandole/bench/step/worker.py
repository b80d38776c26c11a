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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...train.distribute import distribute
from ...train.session import init
from ..measure.intervals import NotMeasurable, sent_bytes
from ..measure.machine import has_16_bits
from .contender_names import MODELS, PRECISIONS, Settings, check_contender, plan_of
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


# What the step benchmark compares: our reducer under several plans, and the alternatives a user would try.
#
# A contender makes its own copy of the model and trains it by one call a step.
#
# [Note: one bucket for PowerSGD] Torch's PowerSGD hook starts its later rounds from callbacks, in whatever order
# buckets get there. With several buckets ranks then disagree on the order of collectives, and gloo aborts
# (measured, torch 2.13, two ranks, five buckets). With one bucket there is one order.


MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[..., torch.optim.Optimizer]
LossOf = Callable[[nn.Module], torch.Tensor]
FIRST_SCALE = 1024.0
"""Loss scale in fp16: torch's own begins so high that its first steps overflow, and are no steps."""


@dataclass(eq=False)
class Contender:
    """A model in training."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: LossOf
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    """Keeps small gradients of 16-bit numbers from becoming zero, where `train_in` says so."""

    def train_in(self, precision: str, device: str) -> None:
        """Compute loss and forward in `precision`, one of `PRECISIONS`, by autocast; weights stay float32."""
        if precision == "fp32":
            return
        exact, dtype = self.loss_of, torch.bfloat16 if precision == "bf16" else torch.float16

        def loss_of(model: nn.Module) -> torch.Tensor:
            with torch.autocast(device, dtype):
                return exact(model)

        self.loss_of = loss_of
        if dtype is torch.float16:
            self.scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE)

    def step(self) -> torch.Tensor:
        """Train one step; return this rank's loss."""
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def make_contender(
    name: str, make_model: MakeModel, loss_of: LossOf, make_optimizer: MakeOptimizer,
    settings: Settings = MappingProxyType({}),
) -> Contender:  # fmt: skip
    """Make the contender called `name`; `settings` are plan keys for our own.

    ``none``, ``int8``, ... : our reducer with that codec (with ``+bucket_bytes=4MiB`` and the like: further
    plan keys). ``ddp[:MB]``, ``ddp-fp16``, ``ddp-powersgd[:RANK]``, ``ddp-nosync`` (no exchange at all: compute
    alone): the rivals.
    """
    check_contender(name, settings)
    torch.manual_seed(0)
    model = make_model()
    if name.startswith("ddp"):
        return _ddp(name, model, loss_of, make_optimizer)
    plan = plan_of(name, settings)
    optimizer = make_optimizer(model.parameters())
    distribute(model, optimizer, plan)
    return Contender(name, model, optimizer, loss_of)


_ONE_BUCKET = 1 << 20
"""Megabytes of a bucket that takes every model."""


def _ddp(name: str, model: nn.Module, loss_of: LossOf, make_optimizer: MakeOptimizer) -> Contender:
    kind, _, value = name.partition(":")
    optimizer = make_optimizer(model.parameters())
    if kind == "ddp-nosync":
        return Contender(name, model, optimizer, loss_of)
    megabytes = int(value) if kind == "ddp" and value else 25
    if kind == "ddp-powersgd":
        megabytes = _ONE_BUCKET  # see [Note: one bucket for PowerSGD]
    wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    if kind == "ddp-fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif kind == "ddp-powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD,
            matrix_approximation_rank=int(value or 4),
            start_powerSGD_iter=2,
            use_error_feedback=True,
            warm_start=True,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Contender(name, wrapped, optimizer, loss_of)

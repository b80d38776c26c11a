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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError, FarandoleError
from ..train.distribute import distribute
from ..train.session import init
from .intervals import NotMeasurable, sent_bytes
from .machine import has_16_bits
from .models import BERT_VOCABULARY, Bert, LanguageModel, SmallCNN, mlp, resnet50, vgg16
from .step import MODELS, PRECISIONS, Settings, check_contender, plan_of

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


# What the step benchmark trains: a model, random batches of its shape on each rank, a loss. No data is read.


Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Work:
    """Something to train."""

    make: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    """From a number of samples to the batch of one rank."""
    loss: Callable[[nn.Module, Batch], torch.Tensor]


def _images(shape: tuple[int, ...], classes: int, batch: int, generator: torch.Generator) -> Batch:
    images = torch.randn(batch, *shape, generator=generator)
    return images, torch.randint(0, classes, (batch,), generator=generator)


def _classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def _tokens(vocabulary: int, length: int, batch: int, generator: torch.Generator) -> Batch:
    return (torch.randint(0, vocabulary, (batch, length + 1), generator=generator),)


def _next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    (tokens,) = batch
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


_MASK, _IGNORED, _MASKED_SHARE = 103, -100, 0.15
BERT_LENGTH, GPT_LENGTH = 128, 128


def _masked_tokens(batch: int, generator: torch.Generator) -> Batch:
    shape = (batch, BERT_LENGTH)
    tokens = torch.randint(1000, BERT_VOCABULARY, shape, generator=generator)
    masked = torch.rand(shape, generator=generator) < _MASKED_SHARE
    masked[:, 1] = True  # a batch with nothing to guess has no loss
    wanted = tokens.masked_fill(~masked, _IGNORED)
    sentences = (torch.arange(BERT_LENGTH) >= BERT_LENGTH // 2).long().expand(shape)
    return tokens.masked_fill(masked, _MASK), sentences, wanted, torch.randint(0, 2, (batch,), generator=generator)


def _pre_trained(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, sentences, wanted, following = batch
    logits, follows = model(tokens, sentences)
    return cross_entropy(logits.flatten(0, 1), wanted.flatten()) + cross_entropy(follows, following)


def _language(make: Callable[[], nn.Module], vocabulary: int, length: int) -> Work:
    return Work(make, partial(_tokens, vocabulary, length), _next_token)


def _pictures(make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> Work:
    return Work(make, partial(_images, shape, classes), _classified)


WORKS = {
    "lm27": _language(partial(LanguageModel, 512, 8, 8, 128, 4096), 4096, 128),
    "small": _language(partial(LanguageModel, 128, 2, 4, 32), 256, 32),
    "resnet50": _pictures(resnet50, (3, 224, 224), 1000),
    "vgg16": _pictures(vgg16, (3, 224, 224), 1000),
    "bert": Work(Bert, _masked_tokens, _pre_trained),
    "gpt": _language(partial(LanguageModel, 768, 12, 12, 1024, 50_257), 50_257, GPT_LENGTH),
    "cifar-cnn": _pictures(partial(SmallCNN, 3, 32), (3, 32, 32), 10),
    "mlp": _pictures(mlp, (784,), 10),
}
"""``lm27`` has 27.4 M parameters, ``small`` 0.4 M; ``bert`` is BERT-base, ``gpt`` GPT-2 small, on 128 tokens."""


_RANDOM = {"normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "xavier_normal_"}


class _NoRandomValues(TorchFunctionMode):
    """Leaves out the random values that modules begin with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func.__name__ in _RANDOM:
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def parameters_of(name: str) -> int:
    """Return how many parameters the model has, without allocating them."""
    with torch.device("meta"), _NoRandomValues():  # random values on meta would import the compiler, for seconds
        return sum(parameter.numel() for parameter in WORKS[name].make().parameters())


if __name__ == "__main__":
    main()

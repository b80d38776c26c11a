"""One rank of `time_to_loss`: times steps of all contenders in turn, or trains one and validates."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

import farandole as fd
from farandole.bench.data import ByteWindows, load_text
from farandole.bench.models import LanguageModel
from farandole.bench.step_worker import Contender, make_contender
from farandole.core.vocabulary.sync_spec import SyncSpec
from farandole.parallel.model import DistributedModel
from shared import of_slowest, slowest_in_turns, timed, worker_parser, write_found

CONTEXT = 64
VALIDATION_WINDOWS = 512
"""Of all ranks together."""
WARM_UP_ROUNDS = 6
"""Until "auto" has chosen, and torch's hook has begun."""
LOCAL_BLOCKS = 3
"""Blocks between two meetings that are timed of contenders whose ranks train on their own, after a first one."""
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20
"""Of the learning rate."""


class Data:
    """Random batches of this rank, the same for all contenders of a seed, and its part of the validation."""

    def __init__(self, world: Any, seed: int, batch: int) -> None:
        self._training, validation = load_text(context=CONTEXT)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(1000 * seed + world.rank)
        count = min(VALIDATION_WINDOWS, len(validation))
        stride = len(validation) // count
        mine = range(world.rank * stride, count * stride, world.size * stride)
        self._validation = [stack(validation, list(mine)[i : i + 32]) for i in range(0, len(mine), 32)]
        self.current = self.draw()

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch."""
        chosen = torch.randint(len(self._training), (self._batch,), generator=self._generator)
        return stack(self._training, chosen.tolist())

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss on the current batch."""
        return cross_entropy(model, *self.current)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        """Return the mean loss over all ranks' windows."""
        bare = getattr(model, "module", model)
        total = torch.zeros(2, dtype=torch.float64)
        for inputs, targets in self._validation:
            total += torch.tensor([float(cross_entropy(bare, inputs, targets)) * len(inputs), len(inputs)])
        dist.all_reduce(total)
        return float(total[0] / total[1])


def stack(windows: ByteWindows, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = default_collate([windows[index] for index in indices])
    return inputs, targets


def cross_entropy(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def make(
    name: str, seed: int, make_model: Callable[[], nn.Module], data: Data, choice: dict[str, Any] | None
) -> Contender:
    def seeded() -> nn.Module:
        torch.manual_seed(seed)
        return make_model()

    make_optimizer = partial(torch.optim.Adam, lr=LEARNING_RATE)
    if choice is None:
        return make_contender(name, seeded, data.loss, make_optimizer)
    model = seeded()
    optimizer = make_optimizer(model.parameters())
    plan = fd.Plan(codec_for=choice["codecs"], bucket_bytes=choice["bucket_bytes"], route="flat")
    fd.distribute(model, optimizer, plan)
    return Contender(name, model, optimizer, data.loss)


def time_steps(arguments: argparse.Namespace, world: Any, make_model: Callable[[], nn.Module]) -> dict[str, Any]:
    """Return seconds of steps by contender, each the slowest rank's, and what codec "auto" chose."""
    data = Data(world, 0, arguments.batch)
    contenders = {name: make(name, 0, make_model, data, None) for name in arguments.contenders.split(";")}
    plans = {name: DistributedModel.of(each.model).plan for name, each in contenders.items()}
    local = {name: SyncSpec.parse(plan.sync).steps for name, plan in plans.items()
             if plan is not None and plan.sync != "every_step"}  # fmt: skip
    times: dict[str, list[float]] = {}
    for name, steps in local.items():  # in blocks, from one meeting to the next
        block = timed(contenders[name].step, steps, before=dist.barrier)
        times[name] = of_slowest([block() for _ in range(1 + LOCAL_BLOCKS)][1:])
    steps_of = {name: each.step for name, each in contenders.items() if name not in local}
    times |= slowest_in_turns(steps_of, arguments.rounds, warm_up=WARM_UP_ROUNDS)
    choices = {}
    for name, contender in contenders.items():
        reducer = DistributedModel.of(contender.model).reducer
        choice = None if reducer is None or reducer.tuner is None else reducer.tuner.choice
        if choice is not None:
            codecs = {each: codec for each, codec in choice.codecs.items() if codec != "none"}
            choices[name] = {
                "main": choice.main_codec, "codecs": codecs, "bucket_bytes": choice.bucket_bytes,
            }  # fmt: skip
    contenders.clear()  # wrappers keep groups, which must be gone before the process is
    return {"seconds": times, "choices": choices}


def train(arguments: argparse.Namespace, world: Any, make_model: Callable[[], nn.Module]) -> dict[str, Any]:
    """Train one contender: `steps` steps, and on until the goal is reached, but not for ever."""
    data = Data(world, arguments.seed, arguments.batch)
    choice = None if arguments.choice is None else json.loads(arguments.choice)
    contender = make(arguments.contenders, arguments.seed, make_model, data, choice)
    least = arguments.steps
    most = least if arguments.goal is None else int(least * arguments.most)
    validations: list[dict[str, float]] = []
    seconds, step, each = 0.0, 0, []
    while step < most:
        block = min(arguments.every, (least if step < least else most) - step)
        dist.barrier()
        for _ in range(block):
            begin = time.perf_counter()
            data.current = data.draw()
            for group in contender.optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
            contender.step()
            each.append(time.perf_counter() - begin)
            step += 1
        seconds = sum(each)
        with nullcontext() if DistributedModel.of(contender.model).plan is None else fd.averaged(contender.model):
            loss = data.validate(contender.model)
        validations.append({"step": step, "seconds": seconds, "loss": loss})
        if step >= least and arguments.goal is not None and min(v["loss"] for v in validations) <= arguments.goal:
            break
    del contender
    return {"validations": validations, "step_seconds": statistics.median(each)}


def main() -> None:
    parser = worker_parser(
        __doc__, contenders=str, seed=0, steps=1, every=1, rounds=1, batch=int, width=int, depth=int, goal=float,
        most=1.0, choice=str,
    )  # fmt: skip
    parser.add_argument("mode", choices=["time", "train"])
    arguments = parser.parse_args()
    world = fd.init(device="cpu")
    make_model = partial(LanguageModel, arguments.width, arguments.depth, 4, CONTEXT)
    found = (time_steps if arguments.mode == "time" else train)(arguments, world, make_model)
    found["parameters"] = sum(parameter.numel() for parameter in make_model().parameters())
    write_found(found, arguments)


if __name__ == "__main__":
    main()

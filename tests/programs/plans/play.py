"""A program's loop: on a rank of a layout, and in one process that has the samples of all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.parallel.frozen_weight import FrozenWeight
from farandole.parallel.split import Split, split_of

from .data import Part, batch, count_of, loader, loss_of, of_all, of_rank
from .model import Text, is_named, make_model, make_optimizers, make_schedulers, thaw
from .program import Layout, PlanProgram

CLIP = 0.05
BAD_STEP = 1
"""In which the gradients of one rank are infinite, in programs in float16."""
_EVALUATED = 50
"""Added to a step's number: its samples to evaluate with."""


@dataclass
class Trace:
    """What a rank did from one checkpoint to the next."""

    losses: list[list[tuple[float, float]]] = field(default_factory=list)
    """For each step and pass this rank's loss, and how much it counts."""
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    parts: dict[str, tuple[torch.Tensor, Split | None]] = field(default_factory=dict)
    """What the rank has of each parameter at the end, gathered over its shards."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What a kind looks at."""


@dataclass
class Truth:
    """What one process did."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    parameters: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """After a number of steps, by name."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the optimizers, by the parameter's name, at the end."""


# -- a rank ------------------------------------------------------------------------------------------


class Ranked:
    """A training of a program on this rank."""

    def __init__(self, program: PlanProgram, layout: Layout, *, is_new: bool = True, **keys: Any) -> None:
        self.program, self.layout = program, layout
        self.here = fd.init(timeout_seconds=20)
        self.before_update: Callable[[], None] = lambda: None
        """Called when gradients are the means."""
        self.model: Text = make_model(program)
        if not is_new:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.1)
        self.optimizers = make_optimizers(program, self.model)
        self.schedulers = make_schedulers(program, self.optimizers) if program.early else []
        fd.distribute(self.model, self.optimizers, fd.Plan.from_mapping(self._plan() | keys, where="program"))
        if not program.early:
            self.schedulers = make_schedulers(program, self.optimizers)
        if program.loader and layout in program.layouts:
            self.batches = iter(fd.shard(loader(program, layout)))
        self.others: dict[str, Any] = {f"optimizer{n}": each for n, each in enumerate(self.optimizers) if n}
        self.others |= {f"scheduler{n}": each for n, each in enumerate(self.schedulers)}

    def _plan(self) -> dict[str, Any]:
        program = self.program
        keys: dict[str, Any] = {"timeout_seconds": 20.0, "stall_seconds": 0.0, **self.layout.keys}
        if program.late and program.late_by == "plan":
            first = [name for name, _ in self.model.named_parameters() if not is_named(name, program.late)]
            keys["train_schedule"] = {"0": " ".join(first), "1": "*"}
        if program.clip == "plan":
            keys["clip_norm"] = CLIP
        if program.accumulate == "plan":
            keys["accumulate"] = program.passes
        return keys

    def train(self, first: int, last: int) -> Trace:
        """Make steps; return what they did."""
        trace = Trace()
        for step in range(first, last):
            self.step(step, trace)
        if self.layout.is_delayed:
            self._update_late()
        self.note_parts(trace)
        return trace

    def note_parts(self, trace: Trace) -> None:
        """Note what this rank has of each parameter."""
        for name, parameter in self.model.named_parameters():
            if (parameter.numel() or isinstance(parameter, DTensor)) and not isinstance(parameter, FrozenWeight):
                trace.parts[name] = (whole(parameter), split_of(parameter))

    def step(self, step: int, trace: Trace) -> None:
        """Make one step."""
        program = self.program
        if program.late and program.late_by == "loop" and program.trains_late(step):
            thaw(program, self.model)
        self.model.left_out = left_out(program, step, self.here.sample_rank)
        self.model.rate = rate_of(program, step)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        trace.losses.append([self._pass(step, number) for number in range(program.passes)])
        self.before_update()
        if program.clip == "loop":
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            trace.norms.append(float(whole(norm)))
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if program.evaluate:
            part = self._cut(of_rank(program, self.layout, _EVALUATED + step, 0, self.here.sample_rank))
            found = fd.evaluate(
                self.model, loss_of(program), part.inputs(program), part.targets, count=count_of(program)
            )
            trace.evaluated.append(float(found))

    def _update_late(self) -> None:
        """Make the last update of a pipeline whose gradients come one step late."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if fd.drain(self.model):
            for optimizer in self.optimizers:
                optimizer.step()

    def _part(self, step: int, number: int) -> Part:
        if self.program.loader:
            return Part(*next(self.batches))
        return self._cut(of_rank(self.program, self.layout, step, number, self.here.sample_rank))

    def _pass(self, step: int, number: int) -> tuple[float, float]:
        program, loss_function, count = self.program, loss_of(self.program), count_of(self.program)
        part = self._part(step, number)
        held: AbstractContextManager[Any] = nullcontext()
        if program.accumulate == "loop":
            held = fd.accumulate(number + 1 < program.passes)
        with held:
            if program.loop == "step":
                value = fd.step(
                    self.model, lambda output, targets: loss_function(output, targets) / program.passes,
                    part.inputs(program), part.targets, count=count,
                    balance=program.balance / program.passes, z=program.z / program.passes,
                )  # fmt: skip
                return float(value) * program.passes, 1.0
            extra = self._penalty()
            loss = loss_function(self.model(*part.inputs(program)), part.targets)
            if program.kind == "fp16" and step == BAD_STEP and self.here.sample_rank == 0:
                loss = loss * float("inf")
            counted = float(part.targets.numel() if count is None else count(part.targets))
            if count is not None:
                fd.weight(count(part.targets))
            if program.routes:
                extra = extra + fd.router_loss(self.model, balance=program.balance, z=program.z)
            ((loss + extra) / program.passes).backward()
            return float(loss.detach()) if counted else 0.0, counted

    def _penalty(self) -> torch.Tensor | float:
        """Return the penalty: of shards, and apart of what is whole, such as experts."""
        if not self.program.penalty:
            return 0.0
        shards = [each for each in self.model.parameters() if isinstance(each, DTensor)]
        others = [each for each in self.model.parameters() if not isinstance(each, DTensor)]
        return sum(whole(penalty_of(each, self.program)) for each in (shards, others) if each)

    def _cut(self, part: Part) -> Part:
        if self.layout.degree("context") == 1:
            return part
        return Part(*fd.context_shard(*part, dim=1))

    def save(self, folder: Path) -> None:
        """Save all that the training goes on from."""
        fd.save(folder, self.model, self.optimizers[0], **self.others)

    def load(self, folder: Path) -> None:
        """Load it."""
        fd.load(folder, self.model, self.optimizers[0], **self.others)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor gathered over its shards, without a copy's graph where it has none."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value if value.requires_grad and not value.is_leaf else value.detach().clone()


def penalty_of(parameters: Iterable[nn.Parameter], program: PlanProgram) -> torch.Tensor:
    """Return the penalty on parameters."""
    found: torch.Tensor = sum(each.square().sum() for each in parameters)  # type: ignore[assignment]
    return program.penalty * found


def rate_of(program: PlanProgram, step: int) -> float:
    """Return the number that the model computes with in a step."""
    return 1.0 + 0.1 * (step % _EVALUATED) if program.warms else 1.0


def left_out(program: PlanProgram, step: int, rank: int) -> frozenset[int]:
    """Return the blocks that do not run in a step, on a rank with samples of its own."""
    if program.skip == "none":
        return frozenset()
    dice = random.Random(f"{program.seed} {step} {rank if program.skip == 'rank' else 0}")
    return frozenset(number for number in range(program.layers) if dice.random() < 0.4)


# -- one process -------------------------------------------------------------------------------------


class Alone:
    """The training of a program in one process, that has the samples of all ranks."""

    def __init__(self, program: PlanProgram) -> None:
        self.program = program
        self.model = make_model(program)
        self.optimizers = make_optimizers(program, self.model)
        self.schedulers = make_schedulers(program, self.optimizers)
        self.truth = Truth()
        self.skipped: frozenset[int] = frozenset()
        """Steps whose update is left out."""
        self.late: dict[torch.Tensor, torch.Tensor | None] = {}
        """Gradients of the batch before, where they come one step late."""
        self.codec = str(program.first.keys.get("frozen_codec", "none"))
        for name, each in self.model.named_parameters():
            if self.codec != "none" and not each.requires_grad and name.endswith("weight") and each.dim() == 2:
                each.data = FrozenWeight.encode(each, self.codec).decode()

    def train(self) -> Truth:
        """Make all steps."""
        program, truth = self.program, self.truth
        ends = {program.span(number)[1] for number in range(len(program.layouts))}
        for step in range(program.steps):
            self.step(step)
            if step + 1 in ends:
                if program.layout_at(step).is_delayed:
                    self._delay()
                    self._update()
                    self.late.clear()
                truth.parameters[step + 1] = {
                    name: each.detach().clone().requires_grad_(each.requires_grad)
                    for name, each in self.model.named_parameters()
                }
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer in self.optimizers:
            truth.states |= {names[parameter]: state for parameter, state in optimizer.state.items()}
        return truth

    def step(self, step: int) -> None:
        """Make one step."""
        program, truth = self.program, self.truth
        for name, parameter in self.model.named_parameters():
            if is_named(name, program.late) and not is_named(name, program.frozen):
                parameter.requires_grad_(program.trains_late(step))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        truth.losses.append(sum(self._pass(step, number) for number in range(program.passes)) / program.passes)
        if program.layout_at(step).is_delayed:
            self._delay()
        if step not in self.skipped:
            self._update()
        for scheduler in self.schedulers:
            scheduler.step()
        if program.evaluate:
            with torch.no_grad():
                parts = [loss * weight for loss, weight in self._losses(_EVALUATED + step, 0)]
            truth.evaluated.append(float(sum(parts)))

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Return the gradients of a step with the parameters as they are."""
        self.model.zero_grad()
        for number in range(self.program.passes):
            self._pass(step, number)
        return {name: each.grad for name, each in self.model.named_parameters() if each.grad is not None}

    def _delay(self) -> None:
        """Let the gradients be those of the batch before."""
        for parameter in self.model.parameters():
            parameter.grad, self.late[parameter] = self.late.get(parameter), parameter.grad

    def _update(self) -> None:
        if self.program.clip != "none":
            self.truth.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)))
        for optimizer in self.optimizers:
            optimizer.step()

    def _pass(self, step: int, number: int) -> float:
        program, total = self.program, 0.0
        for loss, weight in self._losses(step, number):
            total += float(loss.detach()) * weight
            routers = fd.router_loss(self.model, balance=program.balance, z=program.z) if program.routes else 0.0
            ((loss + routers) * weight / program.passes).backward()
        if program.penalty:
            (penalty_of(self.model.parameters(), program) / program.passes).backward()
        return total

    def _losses(self, step: int, number: int) -> Iterator[tuple[torch.Tensor, float]]:
        """Yield the losses of micro-batches, or of ranks where these go different ways, and what each counts."""
        program = self.program
        layout = program.layout_at(step % _EVALUATED)
        count, loss_function = count_of(program), loss_of(program)
        parts: Sequence[Part] = of_all(program, layout, step, number)
        if program.loader:
            parts = [batch(program, step, number)]
        if program.skip == "rank":
            parts = [of_rank(program, layout, step, number, rank) for rank in range(layout.samples)]
        counts = [float(part.targets.numel() if count is None else count(part.targets)) for part in parts]
        for rank, (part, counted) in enumerate(zip(parts, counts, strict=True)):
            self.model.left_out = left_out(program, step % _EVALUATED, rank)
            self.model.rate = rate_of(program, step)
            yield loss_function(self.model(*part.inputs(program)), part.targets), counted / sum(counts)

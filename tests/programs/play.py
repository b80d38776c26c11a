"""Plays a program: as one of several ranks, or as one process that has the data of all.

Both sides run the same loop. They differ in three things only (`Side`): whether `fd.distribute` is called, where
batches come from, and what a backward pass is of: this rank's loss, or the weighted sum of all ranks' losses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd

from .disturb import change_model
from .model import Net, Thawed, loss_of
from .program import Program

ROWS = 4
"""Of a rank in an even batch."""
Tensors = dict[str, torch.Tensor | None]
OVERFLOW_STEP = 2
THAW_STEP = 2


@dataclass(frozen=True)
class Portion:
    """Part of a step's data: how much it weighs in the loss, and as which rank it runs through the model."""

    x: torch.Tensor
    y: torch.Tensor
    weight: float
    rank: int


@dataclass
class Trace:
    """What a program did."""

    gradients: list[Tensors] = field(default_factory=list)
    """After each step's last backward pass, by name."""
    parameters: list[Tensors] = field(default_factory=list)
    """After each step."""
    buffers: list[Tensors] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    """Of the losses, in each step."""
    kept: list[str] = field(default_factory=list)
    """Gradients that the loop had kept and that changed."""


class Side(Protocol):
    """What differs between ranks and one process."""

    def distribute(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Let the model train on all ranks."""

    def batches(self) -> Iterator[list[Portion]]:
        """Yield the data of one backward pass after the other."""

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of all ranks."""


# -- the two sides -----------------------------------------------------------------------------------


class Ranks:
    """One of the ranks of a world."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rank = fd.world().rank

    def distribute(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """See `Side`."""
        fd.distribute(model, optimizers, plan_of(self.program))

    def batches(self) -> Iterator[list[Portion]]:
        """See `Side`."""
        if self.program.data == "even":
            for x, y in _even(self.program):
                mine = slice(self.rank * ROWS, (self.rank + 1) * ROWS)
                yield [Portion(x[mine], y[mine], 1.0, self.rank)]
        else:
            loader: Any = fd.shard(DataLoader(_dataset(self.program), batch_size=ROWS))
            while True:
                epoch = iter(loader)
                for x, y in _ahead(epoch) if self.program.data == "ahead" else epoch:
                    yield [Portion(x, y, 1.0, self.rank)]

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """See `Side`."""
        return torch.tensor(fd.mean(loss.detach()), dtype=loss.dtype)


class Alone:
    """One process with the data of all ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def distribute(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """See `Side`."""

    def batches(self) -> Iterator[list[Portion]]:
        """See `Side`."""
        ranks = self.program.ranks
        if self.program.data == "even" and "batch_norm" not in self.program.blocks:
            for x, y in _even(self.program):
                yield [
                    Portion(each_x, each_y, 1 / ranks, rank)
                    for rank, (each_x, each_y) in enumerate(zip(x.split(ROWS), y.split(ROWS), strict=True))
                ]
        elif self.program.data == "even":
            for x, y in _even(self.program):
                yield [Portion(x, y, 1.0, 0)]
        else:
            while True:
                for x, y in DataLoader(_dataset(self.program), batch_size=ROWS * ranks):
                    yield [Portion(x, y, 1.0, 0)]

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """See `Side`."""
        return loss.detach()


def plan_of(program: Program) -> fd.Plan:
    """Return the plan of a program."""
    codec = program.codec
    if program.is_lossy and codec != "auto" and not program.feedback:
        codec += ("," if ":" in codec else ":") + "feedback=false"
    return fd.Plan(
        bucket_bytes=program.bucket_bytes,
        first_bucket_bytes=program.first_bucket_bytes,
        accumulate=program.passes if program.accumulate else 1,
        clip_norm=0.05 if program.clip == "plan" else None,
        sync_batch_norm=True,
        codec=codec,
        lossy=program.codec == "auto",
        route=program.route,  # type: ignore[arg-type]
        connections=program.connections,
        timeout_seconds=15.0,
        zero=program.stage,
    )


def _even(program: Program) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(program.seed)
    while True:
        yield _rows(program, ROWS * program.ranks, generator)


def _dataset(program: Program) -> TensorDataset:
    generator = torch.Generator().manual_seed(program.seed)
    rows = 2 * ROWS * program.ranks + 2 + program.seed % (2 * program.ranks)  # a batch of one has no deviation
    return TensorDataset(*_rows(program, rows, generator))


def _rows(program: Program, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = getattr(torch, program.dtype)
    x = torch.randn(rows, program.width, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def _ahead(epoch: Iterator[Any]) -> Iterator[Any]:
    """Fetch the next batch before the current one is used, as prefetchers do."""
    current = next(epoch, None)
    while current is not None:
        following = next(epoch, None)
        yield current
        current = following


# -- the loop ----------------------------------------------------------------------------------------


def play(program: Program, side: Side, watch: Callable[[int, Loop], None] | None = None) -> Trace:
    """Run `program`; `watch` is called with the step before each optimizer's step."""
    loop = Loop(program, side)
    for step in range(program.steps):
        loop.step(step, watch)
    return loop.trace


class Loop:
    """A user's training loop."""

    def __init__(self, program: Program, side: Side) -> None:
        torch.manual_seed(program.seed)
        if program.compiled != "none":
            torch._dynamo.reset()
            # Dynamo asks tensors for their gradient and hides the warning; it cannot hide one that is an error.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        # Zeros that were left as gradients lie as the parameters did before; torch says that this is slower.
        warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
        self.program, self.side, self.trace = program, side, Trace()
        self.models = [Net(program) for _ in range(2 if program.pair else 1)]
        if program.pair:
            dtype = getattr(torch, program.dtype)
            self.models[0].head = nn.Linear(program.width, program.width, dtype=dtype)
        if program.disturbance == "channels_last":
            for net in self.models:
                net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.called: list[nn.Module] = [*self.models]
        if program.compiled == "before":
            self.called = [torch.compile(net, backend="aot_eager") for net in self.models]  # type: ignore[misc]
        self.optimizers = [_optimizers(program, net) for net in self.models]
        for net, optimizers in zip(self.models, self.optimizers, strict=True):
            side.distribute(net, optimizers)
        if program.compiled == "after":
            self.called = [torch.compile(net, backend="aot_eager") for net in self.models]  # type: ignore[misc]
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=256.0,
            growth_interval=1 if program.scaler == "growing" else 10**6,
            enabled=program.scaler != "none",
        )
        self.batches = side.batches()
        self.held: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.turn = 0
        """Which model's parameters change in this step."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All models' parameters by name."""
        named: dict[str, nn.Parameter] = {}
        for number, net in enumerate(self.models):
            named |= {f"{number}.{name}": parameter for name, parameter in net.named_parameters()}
        return named

    def step(self, step: int, watch: Callable[[int, Loop], None] | None = None) -> None:
        """Make one step of training."""
        program = self.program
        self.turn = step % len(self.models)
        if step == THAW_STEP:
            for block in self.models[0].blocks:
                if isinstance(block, Thawed):
                    block.requires_grad_(True)
        disturbs = step % 2 == 1
        optimizers = self.optimizers[self.turn]
        if program.optimizer == "two_passes":
            self._two_passes(step, optimizers[0])
        elif program.closure or program.optimizer == "lbfgs":
            batch = next(self.batches)

            def closure() -> torch.Tensor:
                self._clear()
                loss = self._backward(step, batch)
                self._clip_as_planned(optimizers)
                return loss

            optimizers[0].step(closure)  # type: ignore[arg-type]
        else:
            self._clear()
            for number in range(program.passes):
                self._backward(step, next(self.batches), last=number == program.passes - 1)
                if disturbs and number == 0:
                    self._disturb_gradients()
            self._note_gradients()
            if watch is not None:
                watch(step, self)
            self._clip_and_step(optimizers)
        if disturbs:
            self._disturb_model()
        self._note_parameters()

    # -- parts of a step -----------------------------------------------------------------------

    def loss(self, step: int, portion: Portion) -> torch.Tensor:
        """Return the loss of a portion of the data."""
        for net in self.models:
            net.place.rank, net.place.step = portion.rank, step
        if not self.program.pair:
            return loss_of(self.called[0], portion.x, portion.y, penalty=self.program.penalty)
        made = self.called[0](portion.x)
        judged = self.called[1](made.detach() if self.turn == 1 else made)
        return nn.functional.mse_loss(judged, portion.y)

    def _backward(self, step: int, batch: list[Portion], *, last: bool = True) -> torch.Tensor:
        losses = [(self.loss(step, portion), portion) for portion in batch]
        total = torch.stack([loss * portion.weight for loss, portion in losses]).sum()
        scaled = self.scaler.scale(total)
        if self.program.scaler == "overflow" and step == OVERFLOW_STEP and last:
            bad = [loss for loss, portion in losses if portion.rank == 0]
            scaled = torch.stack([scaled, *(loss * float("inf") for loss in bad)]).sum()
        scaled.backward()
        return self.side.mean(total)

    def _two_passes(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """As sharpness-aware minimisation does: climb, look at the gradient there, go back, step."""
        batch = next(self.batches)
        moved: list[tuple[nn.Parameter, torch.Tensor]] = []

        def closure() -> torch.Tensor:
            self._clear()
            self._backward(step, batch)
            with torch.no_grad():
                for parameter in self.models[0].parameters():
                    if parameter.grad is not None:
                        moved.append((parameter, parameter.detach().clone()))
                        parameter.add_(parameter.grad.to_dense(), alpha=0.05)
            self._clear()
            loss = self._backward(step, batch)
            with torch.no_grad():
                for parameter, before in moved:
                    parameter.copy_(before)
            self._clip_as_planned([optimizer])
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    def _clear(self) -> None:
        if self.program.zero == "model":
            for net in self.models:
                net.zero_grad()
        else:
            for optimizers in self.optimizers:
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=self.program.zero == "none")

    def _clip_and_step(self, optimizers: list[torch.optim.Optimizer]) -> None:
        parameters = list(self.models[self.turn].parameters())
        if self.program.clip == "loop":
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        else:
            self._clip_as_planned(optimizers)
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def _clip_as_planned(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Do what `fd.distribute` does where the plan says so."""
        if self.program.clip == "plan" and isinstance(self.side, Alone):
            if self.scaler.is_enabled():
                for optimizer in optimizers:
                    self.scaler.unscale_(optimizer)
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 0.05)

    # -- what else a loop may do ---------------------------------------------------------------

    def _disturb_gradients(self) -> None:
        what = self.program.disturbance
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is None:
                continue
            if what == "grad_data":
                grad.data = grad.data * 1.0
            elif what == "grad_clone":
                parameter.grad = grad.clone()
            elif what == "grad_detach":
                parameter.grad = grad.detach()
            elif what == "grad_times_one":
                parameter.grad = grad * 1.0
            elif what == "hand_written":
                parameter.grad = None
                parameter.grad = torch.ones_like(parameter) * 0.01
            elif what == "keep_grads":
                self.held.append((name, grad, grad.clone()))

    def _disturb_model(self) -> None:
        changed = [name for name, kept, copied in self.held if not torch.equal(kept, copied)]
        self.trace.kept += changed if self.program.zero == "none" and self.program.passes == 1 else []
        for net, optimizers in zip(self.models, self.optimizers, strict=True):
            change_model(self.program, net, optimizers)
        if self.program.disturbance == "throw_away":
            self._backward(0, next(self.batches))
            self._clear()

    # -- notes ---------------------------------------------------------------------------------

    def _note_gradients(self) -> None:
        self.trace.scales.append(self.scaler.get_scale())
        self.trace.gradients.append({name: _copy(p.grad) for name, p in self.parameters.items()})

    def _note_parameters(self) -> None:
        self.trace.parameters.append({name: _copy(p.detach()) for name, p in self.parameters.items()})
        named = {f"{n}.{name}": b for n, net in enumerate(self.models) for name, b in net.named_buffers()}
        self.trace.buffers.append({name: _copy(buffer) for name, buffer in named.items()})


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().clone()
    return (tensor.to_dense() if tensor.is_sparse else tensor).detach().clone()


def _optimizers(program: Program, net: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    parts = [parameters] if program.optimizers == 1 else [parameters[::2], parameters[1::2]]
    make: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.05, eps=1e-3),
        "fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=2),
        "two_passes": lambda p: torch.optim.SGD(p, 0.1),
    }
    return [make[program.optimizer](part) for part in parts if part]

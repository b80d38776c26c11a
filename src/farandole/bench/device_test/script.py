"""Small trainings whose gradients are drawn: what is trained, on however many ranks, and what came of it.

A loss is the sum of parameters times drawn numbers, so its gradients are these numbers, to the bit, on every
device. Everything that follows can then be compared by bits: means, residuals, and to rounding what the optimizer
made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

SHAPES = ((128, 64), (64, 128), (64, 128))
"""Parameters large enough for every codec, of whole blocks for up to eight ranks."""
_INITIAL_SCALE = 64.0
_CLIP_NORM = 1.0
_LEARNING_RATE = 0.1


class DrawnStep(NamedTuple):
    """One step of a training."""

    halves: int = 1
    """Backward passes whose gradients are added up."""
    overflows: bool = False
    """Whether the loss of the last rank is infinite."""
    leaves_out: bool = False
    """Whether the last rank does not use the last parameter."""
    reloads: bool = False
    """Whether what codecs keep is saved before, and loaded into a model that is made anew."""


class Script(NamedTuple):
    """A training."""

    steps: tuple[DrawnStep, ...]
    is_scaled: bool = False
    """Whether a `GradScaler` scales losses and leaves out steps, and gradients are clipped."""

    def without_overflow(self) -> Script:
        """Return it without the steps that a scaler leaves out."""
        return self._replace(steps=tuple(step for step in self.steps if not step.overflows))


PLAIN = Script((DrawnStep(),) * 4)
FULL = Script(
    (
        DrawnStep(),
        DrawnStep(halves=2),
        DrawnStep(overflows=True),
        DrawnStep(leaves_out=True),
        DrawnStep(),
        DrawnStep(reloads=True),
        DrawnStep(),
    ),
    is_scaled=True,
)


class Played(NamedTuple):
    """What one rank ended with, in CPU memory."""

    means: list[list[torch.Tensor]]
    """By step and parameter, times the loss scale; NaN where a step is left out."""
    residuals: list[torch.Tensor]
    """By parameter; empty where the codec keeps none."""
    parameters: list[torch.Tensor]


class DrawnLoss(nn.Module):
    """The parameters. Called with drawn gradients, None for a parameter that is not used; returns the loss, ()."""

    def __init__(self, device: torch.device, values: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        first = _draw(0, SHAPES) if values is None else values
        self.matrices = nn.ParameterList([nn.Parameter(each.detach().to(device, copy=True)) for each in first])

    def forward(self, drawn: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """See the class."""
        pairs = zip(self.matrices, drawn, strict=True)
        return torch.stack([(matrix * each).sum() for matrix, each in pairs if each is not None]).sum()


@dataclass
class Replica:
    """One rank's model, and what trains it."""

    rank: int
    model: DrawnLoss
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: torch.amp.GradScaler | None = None
    means: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), _LEARNING_RATE)

    def renew(self, device: torch.device) -> None:
        """Make the model and its optimizer anew, with the parameters as they are."""
        self.model = DrawnLoss(device, list(self.model.parameters()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), _LEARNING_RATE)


class ReplicaExchange(Protocol):
    """How the gradients of replicas become their mean."""

    def local(self) -> AbstractContextManager[Any]:
        """Return what is entered around a backward pass whose gradients are not exchanged yet."""

    def finish(self, change: float) -> None:
        """After the last backward pass of a step on all replicas: let ``grad`` be the mean.

        `change`: by what the loss scale was multiplied since the last exchange.
        """

    def reload(self) -> None:
        """Save what the codec keeps, make the models anew, and load it there."""

    def residuals(self) -> list[list[torch.Tensor]]:
        """Return what was not sent yet, by replica and parameter."""


def replicas_of(ranks: Sequence[int], device: torch.device) -> list[Replica]:
    """Return replicas that begin alike."""
    return [Replica(rank, DrawnLoss(device)) for rank in ranks]


def play(
    script: Script,
    replicas: Sequence[Replica],
    exchange: ReplicaExchange,
    *,
    size: int,
    device: torch.device,
    after_first: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Played]:
    """Train `replicas`, some or all of `size` ranks.

    `after_first`: entered after the first step, which makes what is made once.
    """
    if script.is_scaled:
        for replica in replicas:
            replica.scaler = torch.amp.GradScaler(device.type, init_scale=_INITIAL_SCALE, growth_interval=100)
    # Before the first step: a copy from memory that is not pinned is a wait of the host.
    drawn = [[_gradients(script, number, each.rank, size, device) for each in replicas]
             for number in range(len(script.steps))]  # fmt: skip
    scale = _INITIAL_SCALE

    def train(numbers: range) -> None:
        nonlocal scale
        for number in numbers:
            step = script.steps[number]
            if step.reloads:
                exchange.reload()
            before, scale = scale, next((each.scaler.get_scale() for each in replicas if each.scaler), scale)
            _backward(step, drawn[number], size, replicas, exchange)
            exchange.finish(scale / before)
            for replica in replicas:
                _update(replica)

    train(range(1))
    with after_first():
        train(range(1, len(script.steps)))
    left = exchange.residuals()
    return [
        Played(
            [[mean.cpu() for mean in means] for means in replica.means],
            [each.detach().cpu().clone() for each in residuals],
            [each.detach().cpu().clone() for each in replica.model.parameters()],
        )
        for replica, residuals in zip(replicas, left, strict=True)
    ]


def _backward(
    step: DrawnStep,
    drawn: Sequence[Sequence[Sequence[torch.Tensor | None]]],
    size: int,
    replicas: Sequence[Replica],
    exchange: ReplicaExchange,
) -> None:
    """Give all replicas the gradients of a step. `drawn`: by replica, backward pass and parameter."""
    for replica, halves in zip(replicas, drawn, strict=True):
        replica.optimizer.zero_grad()
        for half, gradients in enumerate(halves):
            loss = replica.model(gradients)
            if step.overflows and replica.rank == size - 1:
                loss = loss * torch.inf
            loss = loss if replica.scaler is None else replica.scaler.scale(loss)
            with nullcontext() if half + 1 == len(halves) else exchange.local():
                loss.backward()


def _update(replica: Replica) -> None:
    """Note the means, and make the optimizer's step."""
    replica.means.append([_grad(each).detach().clone() for each in replica.model.parameters()])
    if replica.scaler is None:
        replica.optimizer.step()
        return
    replica.scaler.unscale_(replica.optimizer)
    nn.utils.clip_grad_norm_(replica.model.parameters(), _CLIP_NORM)
    replica.scaler.step(replica.optimizer)
    replica.scaler.update()


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "a parameter that some rank uses has the mean on all ranks"
    return parameter.grad


def _gradients(
    script: Script, number: int, rank: int, size: int, device: torch.device
) -> list[list[torch.Tensor | None]]:
    """Return what is drawn for one rank in one step, by backward pass and parameter."""
    step = script.steps[number]
    halves: list[list[torch.Tensor | None]] = []
    for half in range(step.halves):
        seed = 1 + half + 10 * (rank + 100 * number)
        halves.append([each.to(device, copy=True) for each in _draw(seed, SHAPES)])
        if step.leaves_out and rank == size - 1:
            halves[-1][-1] = None
    return halves


def _draw(seed: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float32, generator=generator) for shape in shapes]

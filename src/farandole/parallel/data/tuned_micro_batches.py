"""The number of micro-batches of `fd.step` in a job that is tuned: how many, and whether that changes results.

[Note: micro-batches of a tuned job] The global batch stays: a batch is divided into more or fewer parts, whose
gradients add up to the same mean. That is so where the loss is a mean over samples, and where no output depends on
another sample. What contradicts it is looked for in every step: buffers that change (BatchNorm), random numbers
(dropout), collectives in a pass, hooks on gradients. Losses that compare samples, or weigh them, are found by
computing some batches' loss both ways. A rank that finds such a thing divides its batches as the plan says from
then on: no other rank needs to know, because `in_flight` compares passes as the plan has them, and each exchange
holds one batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...comm.device.accelerator import generator_of
from ...comm.engine.reducer import GradientReducer
from ...comm.world.world import World
from ...core.vocabulary.text import write_notice

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far, as a share, the losses of one batch may be apart that is divided in two ways."""
_COARSE_TOLERANCE = 0.02
"""The same for passes in fewer bits."""

_States = tuple[list[Any], list[tuple[int, int]]]
"""Random generators, and buffers."""
_FIRST_BLOCK = 8
"""After two checks the next one waits so many batches: a trial's times hold none."""


class TunedMicroBatches:
    """Asked by `fd.step`; a session of a tuned job has one. See [Note: micro-batches of a tuned job]."""

    def __init__(self, here: World) -> None:
        self._here = here
        self.number = 0
        """Into how many parts batches are divided, if they can be; 0: as the plan says."""
        self.problem = ""
        """Why they are divided as the plan says, for good."""
        self.steps = 0
        """How often `fd.step` was called."""
        self.least_samples = 0
        """The fewest samples that a batch of this rank had."""
        self._divided = self._next_check = 0

    def switch(self, number: int) -> None:
        """Divide into `number` parts from now on."""
        if number != self.number:
            self.number, self._divided, self._next_check = number, 0, 1

    def refuse(self, problem: str) -> None:
        """Divide as the plan says from now on, because of `problem`."""
        self.problem = self.problem or problem

    def begin(self, model: nn.Module, reducer: GradientReducer | None, samples: int, problem: str) -> bool:
        """Begin a step of `samples`; return whether its batch may be divided in another way than the plan says.

        `problem`: why not, as the caller knows it; empty: it does not.
        """
        self.steps += 1
        self.least_samples = min(self.least_samples or samples, samples)
        self.refuse(problem or _problem_of(self._here, model, reducer))
        return not self.problem and self._here.session.batch_weight.by_samples != 0.0

    def wants_check(self) -> bool:
        """Count a batch that is divided in another way; return whether its loss is to be computed both ways."""
        self._divided += 1
        if self._divided < self._next_check:
            return False
        self._next_check = 2 if self._divided == 1 else max(_FIRST_BLOCK, 2 * self._divided)
        return True

    def compare(self, model: nn.Module, loss: float, divided_loss: float) -> None:
        """Compare the losses of one batch: as the plan divides it, and as the tuner does."""
        tolerance = max(_tolerance(each) for each in model.parameters())
        if torch.is_autocast_enabled(self._here.device.type):
            tolerance = _COARSE_TOLERANCE
        if abs(loss - divided_loss) <= tolerance * max(abs(loss), abs(divided_loss)):
            return
        self.refuse(f"the loss of a batch depends on how it is divided ({loss:.6g} and {divided_loss:.6g})")
        write_notice(f"tune: rank {self._here.rank} divides batches as the plan says: {self.problem}")

    @contextmanager
    def watching(self, model: nn.Module, loss_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Watch the passes of a batch; yield the loss function to use in them."""
        if self.problem:
            yield loss_function
            return
        try:
            before, exchanged = _state(self._here, model), _collectives(self._here)
        except RuntimeError as error:
            self.refuse(f"what a pass changes cannot be seen: {error}")
            yield loss_function
            return
        losses = 0

        def watched(output: Any, targets: Any) -> Any:
            nonlocal losses
            loss = loss_function(output, targets)
            losses += 1
            if losses == 1 and exchanged != _collectives(self._here):
                self.refuse("ranks exchange something in a forward pass or its loss")
            return loss

        yield watched
        self._compare_states(before, _state(self._here, model))

    def _compare_states(self, before: _States, after: _States) -> None:
        """Refuse what the passes of a batch have changed."""
        if after[0] != before[0]:
            self.refuse("a pass draws random numbers, as dropout does")
        elif after[1] != before[1]:
            self.refuse("a pass changes buffers, as BatchNorm does")
        if self.problem and self._divided:
            write_notice(f"tune: rank {self._here.rank} divides batches as the plan says: {self.problem}")


def _problem_of(here: World, model: nn.Module, reducer: GradientReducer | None) -> str:
    if here.session.holds_passes:
        return "fd.accumulate holds passes"
    if reducer is None:
        return "nothing is exchanged"
    if reducer.in_flight.noise is not None:
        return "the noise of gradients is measured, by passes"
    if reducer.accumulate != 1:
        return f"accumulate = {reducer.accumulate}"
    if any(each._backward_hooks or _other_hooks(each) for each in model.parameters()):
        return "hooks of the script see the gradients of each pass"
    return ""


def _other_hooks(parameter: Any) -> bool:
    """Return whether more than the reducer waits for gradients."""
    return len(parameter._post_accumulate_grad_hooks or ()) > 1


def _state(here: World, model: nn.Module) -> _States:
    """Return what random numbers are drawn from, and which buffers there are, with the number of their changes."""
    drawn: list[Any] = [torch.default_generator.get_state().numpy().tobytes(), random.getstate()]
    kind, keys, *rest = np.random.get_state(legacy=True)
    drawn.append((kind, np.asarray(keys).tobytes(), rest))
    generator = generator_of(here.device)
    if generator is not None:
        drawn.append(generator.get_state().numpy().tobytes())
    return drawn, [(id(buffer), buffer._version) for buffer in model.buffers()]


def _collectives(here: World) -> tuple[int, ...]:
    """Return how many collectives and agreements there were on this rank."""
    groups: list[Any] = [each for each in (here.group, dist.group.WORLD) if each is not None]
    return (*(each._get_sequence_number_for_group() for each in groups), here.groups.topics_used)


def _tolerance(parameter: torch.Tensor) -> float:
    return _TOLERANCE.get(parameter.dtype, _COARSE_TOLERANCE)

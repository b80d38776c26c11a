"""Records a plan that the script gave, what a plan predicts, and what its peak of memory is measured against.

[Note: memory of others] The planner predicts what a model and its optimizers hold. A process on a CPU holds more:
the interpreter, libraries, data. What is resident when the plan is applied, less the tensors of the model and the
optimizers, is that rest, which is taken off the peak. On an accelerator the allocator counts tensors alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm.device.accelerator import peak_bytes
from ...comm.world.world import World
from ...core.environ.env import read_run_settings
from ...core.host.process_status import peak_resident_bytes, resident_bytes
from ...core.vocabulary import events
from ...core.vocabulary.spec import Plan


class PredictedFacts:
    """The facts of one model; made before it is divided."""

    def __init__(
        self, here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, given: Plan | None
    ) -> None:
        """`given`: the plan that the script gave, if it did."""
        self._here = here
        self._predicted = json.dumps(dict(plan.predicted)) if plan.predicted else ""
        self._other_bytes = _other_bytes(here, model, optimizers) if self._predicted else None
        self._of_script = ""
        if given is not None and read_run_settings().plan_file is None:
            self._of_script = json.dumps({key: value for key, (value, _) in given.differences(Plan()).items()})

    def note(self) -> None:
        """Record them, when the model is divided: what dividing it took is not the training's."""
        if self._of_script:
            self._here.session.recorder.record(events.Setup({events.SETUP_PLAN: self._of_script}))
        if self._predicted:
            facts: dict[str, events.SetupValue] = {
                events.SETUP_PREDICTED: self._predicted,
                events.SETUP_OTHER_BYTES: self._other_bytes,
                events.SETUP_PEAK_BEFORE: peak_of(self._here)(),
            }
            self._here.session.recorder.record(events.Setup(facts))


def peak_of(here: World) -> Callable[[], int | None]:
    """Return what gives the most bytes until now: allocated on this rank's accelerator, or resident."""
    return peak_resident_bytes if here.device.type == "cpu" else partial(peak_bytes, here.device)


def _other_bytes(here: World, model: nn.Module, optimizers: Sequence[Optimizer]) -> int | None:
    """Return what is not the model's. See [Note: memory of others]."""
    if here.device.type != "cpu":
        return 0
    resident = resident_bytes()
    if resident is None:
        return None
    parameters = [*model.parameters()]
    states = [each for optimizer in optimizers for state in optimizer.state.values() for each in state.values()]
    tensors = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None), *states]
    own = {}
    for each in tensors:
        if isinstance(each, torch.Tensor) and each.device.type == "cpu":
            own[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return max(0, resident - sum(own.values()))

"""The plan key `train_schedule`: which parameters train from which step of the optimizer on.

[Note: what a schedule governs] The parameters that require gradients when the model is distributed for the first
time. Others stay frozen, whatever the patterns say. A governed parameter trains if the entry in force names it;
otherwise it does not require gradients, has none, and is not stepped. An entry replaces the one before it.
"""

from __future__ import annotations

import weakref
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..comm.engine.grad_ownership import drop_grads
from ..comm.world.store_sync import all_gather_json
from ..core.vocabulary.errors import PlanError
from ..core.vocabulary.spec import Plan
from .model import DistributedModel, Strategy
from .optim.step_hooks import is_nested_step


class _Progress:
    """What a model's schedule goes by; it outlives `undistribute`."""

    def __init__(self) -> None:
        self.steps = 0
        self.governed: list[str] | None = None


_progress: weakref.WeakKeyDictionary[nn.Module, _Progress] = weakref.WeakKeyDictionary()


class TrainSchedule:
    """The schedule of one distributed model."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = weakref.ref(model)
        self._entries = sorted((int(step), patterns.split()) for step, patterns in plan.train_schedule.items())

    def apply(self) -> None:
        """Let those parameters train whose turn it is."""
        model = self._model()
        if model is None:
            return
        progress = _progress[model]
        patterns = [each for step, each in self._entries if step <= progress.steps][-1]
        for name in progress.governed or ():
            parameter = model.get_parameter(name)
            trains = any(fnmatchcase(name, pattern) for pattern in patterns)
            if trains != parameter.requires_grad:
                parameter.requires_grad_(trains)
                if not trains:
                    drop_grads([parameter])

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step of the optimizer."""
        model = self._model()
        if model is None or is_nested_step(optimizer):
            return
        _progress[model].steps += 1
        if any(step == _progress[model].steps for step, _ in self._entries):
            self.apply()


class StagedTraining(Strategy):
    """The plan key: parameters freeze and train by steps of the first optimizer."""

    keys = ("train_schedule",)

    def check(self) -> None:
        """Raise `PlanError`, on every rank, for a pattern that names no parameter that trains."""
        names = self._governed()
        patterns = [each for value in self.plan.train_schedule.values() for each in value.split()]
        useless = [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]
        answers = [answer for answer in all_gather_json(self.mesh.here, "train schedule", useless) if answer]
        if answers:
            raise PlanError(
                f"plan: train_schedule: the pattern {answers[0][0]!r} matches none of {len(names)} parameters "
                "that require gradients",
                remedy="patterns are of names in model.named_parameters()",
            )

    def prepare(self) -> None:
        """Let those train whose turn it is."""
        names = self._governed()
        _progress.setdefault(self.model, _Progress()).governed = names
        schedule = self.distributed.schedule = TrainSchedule(self.model, self.plan)
        schedule.apply()
        self.distributed.hooks.append(self.optimizers[0].register_step_post_hook(schedule.after_step))

    def _governed(self) -> list[str]:
        progress = _progress.get(self.model)
        if progress is not None and progress.governed is not None:
            return progress.governed
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]


def scheduled_steps(model: nn.Module) -> int | None:
    """Return the steps that the schedule of a model has counted; None without a schedule."""
    return None if DistributedModel.of(model).schedule is None else _progress[model].steps


def resume_schedule(model: nn.Module, steps: int) -> None:
    """Go on after `steps`, as when a checkpoint is loaded, now or when the model is distributed."""
    _progress.setdefault(model, _Progress()).steps = steps
    schedule = DistributedModel.of(model).schedule
    if schedule is not None:
        schedule.apply()

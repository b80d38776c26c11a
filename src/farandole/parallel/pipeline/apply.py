"""The plan's pipeline: a distributed model gets one, which cuts it at the first `fd.step`."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from ...core.schedule import build_schedule
from ...core.schedule_simulation import bubble_seconds
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ..model import DistributedModel, Strategy
from .layout import require_count, require_names
from .messages import PipelinePeers, make_lines, needs_lines
from .pipeline import Pipeline
from .without_flush import DelayedPipeline

_REMEDY = "loss = farandole.step(model, loss_function, inputs, targets), which does forward and backward"


class PipelineParallel(Strategy):
    """A model that `fd.step` cuts into stages, and runs by the plan's schedule."""

    keys = ("pipeline",)

    def check(self) -> None:
        """Raise `PlanError` when the plan's cuts name nothing, or are not as many as its stages need."""
        plan, size = self.plan, self.mesh.size("pipeline")
        names = require_names(self.model, plan.pipeline_cuts)
        schedule = build_schedule(plan.schedule, size, plan.micro_batches or 2 * size, plan.chunks)
        if names:
            require_count(names, schedule.stages)

    def apply(self) -> None:
        """Let `fd.step` do so: at its first call each rank keeps its own parameters, as its optimizers do."""
        mesh, plan = self.mesh, self.plan
        part = mesh.part("pipeline")
        lines = make_lines(part) if needs_lines(mesh.here.device) else {}
        peers = PipelinePeers(mesh.here, part.new_group(), mesh.rank("pipeline"), mesh.size("pipeline"), lines)
        kind = Pipeline if plan.weight_versions == 1 else DelayedPipeline
        assert self.call.when_cut is not None, "something is left to do"
        pipeline = kind(self.model, self.optimizers, plan, peers, finish=self.call.when_cut)
        self.distributed.pipeline = pipeline
        if mesh.here.rank == 0 and pipeline.micro_batches < peers.size:
            bubble = bubble_seconds(plan.schedule, peers.size, 1.0, 1.0, 1.0, chunks=plan.chunks)
            share = bubble / (bubble + 3.0 * pipeline.micro_batches)
            write_notice(
                f"warning: a pipeline of {peers.size} ranks with {pipeline.micro_batches} micro-batches: each "
                f"rank waits about {share:.0%} of a step; set micro_batches = {2 * peers.size} or more in the plan"
            )
        alive = weakref.ref(pipeline)
        self.model.register_forward_pre_hook(_Guard(alive), prepend=True)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(_StepGuard(alive))


def refuse_open_batch(model: nn.Module, what: str) -> None:
    """Raise `ConfigError`, on every rank, while the gradients of the last batch are not there yet.

    `what`: the call that needs them, for the message.
    """
    pipeline = DistributedModel.of(model).pipeline
    if isinstance(pipeline, DelayedPipeline):
        pipeline.refuse_open(what)


class _Guard:
    """Refuses a plain loop. A copy of it, made with a copy of its model, does nothing."""

    def __init__(self, pipeline: weakref.ref[Pipeline] | None = None) -> None:
        self._pipeline = pipeline

    def __call__(self, module: nn.Module, _: Any) -> None:
        pipeline = None if self._pipeline is None else self._pipeline()
        if pipeline is not None and not pipeline.is_inside:
            raise ConfigError(
                f"this {type(module).__name__} is cut into stages (plan: pipeline = {pipeline.peers.size}), and a "
                "rank cannot call it by itself",
                remedy=f"{_REMEDY}; under torch.no_grad() only forward",
            )

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        pipeline = None if self._pipeline is None else self._pipeline()
        if pipeline is not None and pipeline.own is None and _is_for_average(sys._getframe(1)):
            raise ConfigError(
                "AveragedModel is made before the first farandole.step, which leaves a rank a part of the model, "
                "and the average would be of all of it",
                remedy="make it after the first step",
            )
        return (type(self), ())


def _is_for_average(frame: FrameType | None) -> bool:
    """Return whether torch's average of weights makes the copy that is being made."""
    while frame is not None and frame.f_globals.get("__name__") != AveragedModel.__module__:
        frame = frame.f_back
    return frame is not None


class _StepGuard:
    """Refuses an optimizer's step before there was one of the pipeline."""

    def __init__(self, pipeline: weakref.ref[Pipeline]) -> None:
        self._pipeline = pipeline

    def __call__(self, *_: Any) -> None:
        pipeline = self._pipeline()
        if pipeline is not None and pipeline.own is None:
            raise ConfigError(
                "the optimizer steps, and no farandole.step has computed gradients on the pipeline", remedy=_REMEDY
            )

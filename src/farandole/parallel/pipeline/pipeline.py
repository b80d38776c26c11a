"""The steps of a model that is cut into stages, driven by the actions of a schedule.

[Note: random numbers] All ranks of a pipeline see the same samples, so their generators must go the same way. A
step draws one number from the generator, and each stage computes with one of its own that is seeded by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.schedule import build_schedule
from ...core.schedule_simulation import BACKWARD, BACKWARD_INPUT, FORWARD, Action
from ...core.vocabulary.events import (
    PIPELINE_WAIT,
    SETUP_PIPELINE,
    SETUP_PIPELINE_CUTS,
    SETUP_PIPELINE_RANK,
    Phase,
    PipelineAction,
    Setup,
    SetupValue,
)
from ...core.vocabulary.spec import Plan
from ..lower_precision import shared_casts
from ..model import DistributedModel, outer_pass_of
from .cut_model import CutModel, Ownership
from .messages import PipelinePeers, StageMailbox, StageMessage, message_of
from .micro_batches import LossFunction, MicroBatches, as_call, tensors_of
from .program import CutProgram
from .stage import LayerLoss, Stage

_MIX = 0x9E3779B97F4A7C15
"""Spreads the seeds of stages."""


class BatchRun(NamedTuple):
    """A batch on its way through a pipeline."""

    loss_function: LossFunction
    batch: MicroBatches
    cuts: list[CutProgram]
    """By micro-batch."""
    first: int
    """The number that the schedule gives its first micro-batch."""
    losses: dict[int, torch.Tensor]
    """By the schedule's numbers; of the rank with the last stage."""


class Pipeline:
    """One distributed model under a plan with a pipeline."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        peers: PipelinePeers,
        *,
        finish: Callable[[], None],
    ) -> None:
        """`finish`: called by all ranks at the first step, when this rank has its own parameters only."""
        self._model, self.peers, self._finish = model, peers, finish
        self.micro_batches = plan.micro_batches or 2 * peers.size
        self.schedule = build_schedule(plan.schedule, peers.size, self.micro_batches, plan.chunks)
        self.cut = CutModel(model, optimizers, plan, peers, self.schedule)
        self._extra: list[torch.Tensor] = []
        """The losses of layers on this rank in the last step, by their shares."""
        self._layer_loss: LayerLoss | None = None
        self.is_inside = False
        """Whether a step runs, or the code of the model is recorded."""

    @property
    def recorded_name(self) -> str:
        """The schedule's name in records."""
        return self.schedule.name

    @property
    def own(self) -> Ownership | None:
        """The parameters of this rank; None before the first step."""
        return self.cut.own

    def step(
        self,
        loss_function: LossFunction,
        batch: MicroBatches,
        *,
        held: bool,
        layer_loss: LayerLoss | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of a batch; return the mean loss over its micro-batches, on all ranks.

        Without gradients (`torch.no_grad`) only forward, and there may be fewer micro-batches. `held`: the
        gradients are to be exchanged with a later step's. `layer_loss`: losses that layers add, each on its rank.
        """
        trains = torch.is_grad_enabled()
        parts = batch.parts
        self._layer_loss = layer_loss
        self.is_inside = True
        outer = outer_pass_of(self._model)
        try:
            if outer is not None:
                parts = [(outer.begin(self._model, *as_call(inputs)), targets) for inputs, targets in parts]
                batch = replace(batch, parts=parts)
            self.prepare(loss_function, parts[0])
            own = self.cut.own
            assert own is not None, "prepared above"
            with self._own_random():
                with self._inside():
                    cuts = self.cut.programs_for(parts)
                if trains:
                    own.set_tied_aside()
                losses = self._run(loss_function, batch, cuts, trains=trains)
                if trains and not held:
                    own.add_tied()
        finally:
            self.is_inside = False
        return self._mean(batch, losses)

    def prepare(self, loss_function: LossFunction, part: tuple[Any, Any]) -> None:
        """At the first step: cut the model, by the micro-batch `part`."""
        if self.cut.own is None:
            with self._inside():
                self.cut.prepare(loss_function, *part)
            self._finish()
            self._describe()

    def _run(
        self, loss_function: LossFunction, batch: MicroBatches, cuts: list[CutProgram], *, trains: bool
    ) -> list[torch.Tensor]:
        rank = self.peers.index
        schedule = self.schedule if trains else self.schedule.forward_of(len(batch.parts))
        stages = {
            number: Stage(self._model, number, trains=trains, layer_loss=self._layer_loss)
            for number in schedule.stages_of(rank)
        }
        mailbox = StageMailbox(
            self.peers,
            schedule,
            forward_only=not trains,
            buffers=lambda message: self.buffers(message, cuts[message.micro_batch]),
        )
        mailbox.post()
        run = BatchRun(loss_function, batch, cuts, 0, {})
        with shared_casts(self.peers.here.device.type):
            for action in schedule.actions[rank]:
                self.act(action, stages[action.stage], run, mailbox)
        begin = time.monotonic()
        mailbox.close()
        self.peers.here.session.recorder.record(Phase(PIPELINE_WAIT, begin, time.monotonic()))
        self._extra = [
            loss.double() * batch.shares[number]
            for stage in stages.values()
            for number, loss in stage.layer_losses.items()
        ]
        return [run.losses[number] for number in sorted(run.losses)]

    def act(self, action: Action, stage: Stage, run: BatchRun, mailbox: StageMailbox) -> None:
        """Do `action`, on a micro-batch of `run`: receive what it needs, compute, send."""
        recorder = self.peers.here.session.recorder
        asked = time.monotonic()
        received = self._receive(mailbox, action)
        begin = time.monotonic()
        number, here = action.micro_batch, action.micro_batch - run.first
        sent: list[torch.Tensor] = []
        if action.kind == FORWARD:
            tensors = tensors_of(as_call(run.batch.parts[here][0]))
            loss_of = partial(self._loss_of, run.loss_function, run.batch, here)
            with self.cut.autocast(), self._inside():
                sent, loss = stage.forward(number, run.cuts[here], tensors, received, loss_of=loss_of)
            if loss is not None:
                run.losses[number] = loss
        elif action.kind == BACKWARD:
            sent = stage.backward(number, received, run.batch.shares[here])
        elif action.kind == BACKWARD_INPUT:
            sent = stage.backward_inputs(number, received, run.batch.shares[here])
        else:
            stage.backward_weights(number)
        if received:
            recorder.record(Phase(PIPELINE_WAIT, asked, begin))
        recorder.record(PipelineAction(action.stage, action.kind, here, begin, time.monotonic()))
        found = message_of(action, self.schedule)
        if found is not None:
            mailbox.send(found[0], sent)

    def _describe(self) -> None:
        schedule = self.schedule
        chunks = schedule.stages // schedule.ranks
        facts = f"{self.recorded_name} {schedule.ranks} {schedule.micro_batches} {chunks}"
        values: dict[str, SetupValue] = {
            SETUP_PIPELINE: facts,
            SETUP_PIPELINE_RANK: self.peers.index,
            SETUP_PIPELINE_CUTS: " ".join(self.cut.stage_names),
        }
        self.peers.here.session.recorder.record(Setup(values))

    def _receive(self, mailbox: StageMailbox, action: Action) -> list[torch.Tensor]:
        if action.kind == FORWARD:
            return mailbox.receive(StageMessage(action.stage, True, action.micro_batch)) if action.stage else []
        if action.kind not in (BACKWARD, BACKWARD_INPUT) or action.stage + 1 == self.schedule.stages:
            return []
        return mailbox.receive(StageMessage(action.stage, False, action.micro_batch))

    def buffers(self, message: StageMessage, cut: CutProgram) -> list[torch.Tensor]:
        """Return memory for the tensors of `message`, of a micro-batch whose program is `cut`."""
        segment = cut.segments[message.stage]
        specs = [cut.program.specs[each] for each in (segment.receives if message.is_forward else segment.sends)]
        return [
            torch.empty(spec.shape, dtype=spec.dtype, device=self.peers.here.device)
            for spec in specs
            if message.is_forward or spec.trains
        ]

    def _mean(self, batch: MicroBatches, losses: list[torch.Tensor]) -> torch.Tensor:
        last = self.schedule.stage_ranks[-1]
        mean = torch.zeros((), dtype=torch.float64, device=self.peers.here.device)
        if losses:
            mean += batch.mean(losses)
        begin = time.monotonic()
        if self._layer_loss is None:
            loss = self.peers.broadcast_number(mean, last)
        else:
            loss = self.peers.add_number(sum(self._extra, mean))
        self.peers.here.session.recorder.record(Phase(PIPELINE_WAIT, begin, time.monotonic()))
        return loss

    def _inside(self) -> AbstractContextManager[None]:
        outer = outer_pass_of(self._model)
        return nullcontext() if outer is None else outer.inside()

    def _loss_of(self, loss_function: LossFunction, batch: MicroBatches, number: int, output: Any) -> torch.Tensor:
        outer = outer_pass_of(self._model)
        return batch.loss_of(loss_function, number, output if outer is None else outer.end(output))

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """See [Note: random numbers]."""
        seeds = DistributedModel.of(self._model).seeds
        if seeds is not None:
            seeds.enter()
            try:
                yield
            finally:
                seeds.leave()
            return
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        device = self.peers.here.device
        devices = [device.index or 0] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((seed + _MIX * self.peers.index) % 2**63)
            yield

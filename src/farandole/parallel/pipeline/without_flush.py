"""A pipeline whose batches follow each other without a flush (Narayanan et al. 2006.09503, section 3.1).

[Note: what a step does] In step t a rank runs all forward passes of batch t, and the backward passes that
`core.schedule_simulation` puts between them: the last ones of batch t - 1 and the first ones of batch t. Then
batch t - 1 has ended everywhere, and its gradients become those of the parameters. Its passes used the weights
from before the last update: W(t + 1) = W(t) - update by the gradient of batch t - 1 at W(t - 1).

[Note: no waiting for all] Nothing in a step may wait for all ranks, or there would be a flush after all. Whether
the ranks were given the same batch is found out in two ways: each rank compares with the rank before it, before it
receives tensors whose shapes might differ; and all compare with all, on the way until the first backward pass of
the batch, which no rank reaches before all have begun it. A rank that sees a difference tells the next one, does
what others still need of the batch before, and then raises as all do. The loss travels while the next batch runs.

[Note: memory of two versions] Passes of a batch run on leaves that share the parameters' memory. When the batch
is left open, the parameters get other memory with the same numbers, which the optimizer then changes: that of the
batch before, whose passes have ended. So there are two copies of the weights, and one is copied in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...comm.engine.grad_ownership import GradsAside, replace_grad
from ...comm.world.comm_errors import translated
from ...comm.world.world import refused_by_all
from ...core.schedule_simulation import BACKWARD, FORWARD, Action, BatchesInARow, Rows, Schedule
from ...core.vocabulary.errors import ConfigError, FarandoleError, PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ..lower_precision import shared_casts
from .cut_model import REMEDIES
from .messages import PeerAgreement, PipelinePeers, StageMailbox, StageMessage
from .micro_batches import LossFunction, MicroBatches, unequal_targets
from .pipeline import BatchRun, Pipeline
from .program import CutProgram
from .stage import Stage

# The loss of a batch that has not passed the last stage everywhere yet: a tensor that waits when it is read.


class LaterLoss(torch.Tensor):
    """A scalar whose value is on its way; whatever reads it waits for it. Results are plain tensors."""

    _finish: Callable[[], torch.Tensor] | None
    _value: torch.Tensor | None

    @classmethod
    def of(cls, finish: Callable[[], torch.Tensor]) -> LaterLoss:
        """Return a loss whose value `finish` waits for. It may raise, and is called once."""
        loss = torch.empty((), dtype=torch.float64).as_subclass(cls)
        loss._finish, loss._value = finish, None
        return loss

    def wait(self) -> torch.Tensor:
        """Return the value, a plain tensor."""
        if self._value is None:
            assert self._finish is not None, "no value, and nothing to wait for"
            self._value = self._finish()
            self._finish = None
        return self._value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function` with values."""
        args, kwargs = pytree.tree_map_only(LaterLoss, LaterLoss.wait, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


# The weights that the passes of one batch use, whatever the optimizer does to the parameters meanwhile.


class WeightVersion:
    """The weights of parameters as they are now, for one batch. See [Note: memory of two versions]."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters`: those of `model` that train and are here."""
        # `data` has a version counter of its own: changes of the parameter are none of the leaf.
        self._leaves = [(parameter, nn.Parameter(parameter.data)) for parameter in parameters]
        leaf_of = {id(parameter): leaf for parameter, leaf in self._leaves}
        self._homes = [
            (module, name, parameter, leaf_of[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in leaf_of
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the modules compute with these weights: forward passes, and what backward passes compute again."""
        for module, name, _, leaf in self._homes:
            _assign(module, name, leaf)
        try:
            yield
        finally:
            for module, name, parameter, _ in self._homes:
                _assign(module, name, parameter)

    @torch.no_grad()
    def part_from_parameters(self, before: WeightVersion | None) -> None:
        """Give the parameters other memory, so that an optimizer does not change these weights.

        `before`: a version whose passes have ended; its memory is used.
        """
        ended = {} if before is None else {id(parameter): leaf for parameter, leaf in before._leaves}
        for parameter, _ in self._leaves:
            memory: torch.Tensor | None = ended.get(id(parameter))
            fits = memory is not None and (memory.shape, memory.stride(), memory.dtype, memory.device) == (
                parameter.shape, parameter.stride(), parameter.dtype, parameter.device,
            )  # fmt: skip
            if memory is None or not fits or memory.data_ptr() == parameter.data_ptr():
                memory = torch.empty_like(parameter)
            parameter.data = memory.data.copy_(parameter.data)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of the passes to those of the parameters, which may have none."""
        for parameter, leaf in self._leaves:
            gradient = leaf.grad
            if gradient is None:
                continue
            replace_grad(leaf, None)
            if parameter.grad is None:
                replace_grad(parameter, gradient)
            else:
                parameter.grad.add_(gradient)


def _assign(module: nn.Module, name: str, tensor: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = tensor
    else:  # such as recurrent layers, which keep a list of their weights
        setattr(module, name, tensor)


_REMEDY = "call farandole.drain(model) and optimizer.step() before it"


class TrainedBatch(NamedTuple):
    """What a step gives."""

    loss: torch.Tensor
    """The mean over all ranks, on its way: an operation on it waits."""
    share: float | None
    """This rank's share of the samples of the batch whose gradients are there now. None: there are none."""


class _OpenBatch(NamedTuple):
    run: BatchRun
    version: WeightVersion
    share: float


class OpenMailbox(StageMailbox):
    """The messages of batches that follow each other, on one rank."""

    def __init__(
        self,
        peers: PipelinePeers,
        schedule: Schedule,
        rows: BatchesInARow,
        buffers: Callable[[StageMessage], list[torch.Tensor]],
    ) -> None:
        super().__init__(
            peers, replace(schedule, actions=((),) * schedule.ranks), forward_only=False, buffers=buffers
        )
        self._rows = rows
        self.taken_before: int | None = None
        """Position of the first action that other ranks may leave out; None: they do all of their actions."""

    def expect(self, rows: Rows) -> None:
        """Receive what these actions of all ranks send here."""
        self._expect(rows)
        self.post()

    def _position(self, rank: int, action: Action) -> int:
        return self._rows.position(rank, action)

    def _forget_sent(self, receiver: int, before: int | None) -> None:
        if before is not None and self.taken_before is not None:
            before = min(before, self.taken_before)
        super()._forget_sent(receiver, before)


class DelayedPipeline(Pipeline):
    """One distributed model under a plan with two versions of the weights. See [Note: what a step does]."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        peers: PipelinePeers,
        *,
        finish: Callable[[], None],
    ) -> None:
        """Raises `PlanError` for fewer micro-batches than ranks; `ConfigError` for parameters with hooks."""
        super().__init__(model, optimizers, plan, peers, finish=finish)
        self._rows = BatchesInARow(peers.size, self.micro_batches)
        _refuse_hooks(model)
        self._batches: list[_OpenBatch] = []
        """Whose backward passes have not all ended, or whose gradients are not the parameters' yet."""
        self._count = 0
        """Batches since the pipeline was empty."""
        self._stage = Stage(model, peers.index, trains=True)
        self._mailbox = self._new_mailbox()
        self._ended: WeightVersion | None = None
        """The weights of the last batch that has ended."""
        self._loss: LaterLoss | None = None
        self._headers: list[tuple[object, torch.Tensor]] = []
        self._interrupted = False
        """Whether a step has ended by an exception between its first and its last message."""
        peers.here.session.call_on_close(self.close, first=True)

    @property
    def recorded_name(self) -> str:
        """No schedule with a flush, whose bubble `farandole diagnose` would look for."""
        return f"{self.schedule.name}-without-flush"

    def refuse_open(self, what: str) -> None:
        """Raise `ConfigError`, as all ranks do, if a batch is open."""
        if self._batches:
            raise ConfigError(
                f"{what}: the gradients of the last batch are not there yet (plan: weight_versions = 2)",
                remedy=_REMEDY,
            )

    def train(
        self, loss_function: LossFunction, batch: MicroBatches, *, share: float, is_unequal: ConfigError | None
    ) -> TrainedBatch:
        """Run a step. See [Note: what a step does].

        Args:
            loss_function: as in `fd.step`.
            batch: with the plan's number of micro-batches.
            share: this rank's share of the samples, over the mean share.
            is_unequal: what is raised, on all ranks, if that of some rank is no None.
        """
        self._refuse_interrupted()
        self.is_inside = True
        try:
            self.prepare(loss_function, batch.parts[0])
            self._refuse_tied()
            version = self._passes(loss_function, batch, share)
        finally:
            self.is_inside = False
        before, self._loss = self._loss, self._later_loss(is_unequal)
        if before is not None:
            before.wait()
        ended = self._batches.pop(0) if self._count > 1 else None
        if self._rows.ahead(self.peers.index):
            version.part_from_parameters(self._ended if ended is None else ended.version)
        self._interrupted = False
        if ended is None:
            return TrainedBatch(self._loss, None)
        ended.version.add_gradients()
        return TrainedBatch(self._loss, ended.share)

    def drain(self) -> float | None:
        """Run the backward passes that are still open: the gradients of the last batch are the parameters' then.

        Returns this rank's share of the samples of that batch; None if there is none. To be called by all ranks.
        """
        if not self._batches:
            return None
        self._refuse_interrupted()
        self._interrupted = self.is_inside = True
        try:
            rows = self._rows.end(self._count)
            self._mailbox.expect(rows)
            self._act_all(rows[self.peers.index], None)
            self._mailbox.close()
        finally:
            self.is_inside = False
        assert self._loss is not None, "a batch is open"
        self._loss.wait()
        (ended,) = self._batches
        self._batches, self._count, self._loss, self._headers = [], 0, None, []
        self._mailbox, self._ended, self._interrupted = self._new_mailbox(), ended.version, False
        ended.version.add_gradients()
        return ended.share

    def close(self) -> None:
        """The world closes: say so if the last batch was in vain."""
        if self._batches and not self._interrupted:
            if self.peers.here.rank == 0:
                write_notice(
                    "warning: the gradients of the last batch were never used (plan: weight_versions = 2); after "
                    "the loop call farandole.drain(model) and optimizer.step()"
                )
            assert self._loss is not None, "a batch is open"
            with suppress(FarandoleError):
                self._loss.wait()  # until then other ranks may need what this one has sent
        self._batches, self._headers = [], []
        self._mailbox = self._new_mailbox()

    # -- one step ----------------------------------------------------------------------------------

    def _passes(self, loss_function: LossFunction, batch: MicroBatches, share: float) -> WeightVersion:
        trained = self._trained()
        aside = GradsAside([parameter for _, parameter in trained])
        try:
            with self._own_random():
                agreement = None
                if self._count:
                    self._interrupted = True
                    agreement = self._begin(batch)
                    cuts = self.cut.agreed_programs(batch.parts, agreement.check)
                else:
                    cuts = self.cut.programs_for(batch.parts)
                    self._interrupted = True
                version = WeightVersion(self._model, [parameter for _, parameter in trained])
                run = BatchRun(loss_function, batch, cuts, self._count * self.micro_batches, {})
                self._batches.append(_OpenBatch(run, version, share))
                rows = self._rows.batch(self._count)
                self._mailbox.expect(rows)
                with shared_casts(self.peers.here.device.type):
                    self._act_all(rows[self.peers.index], agreement)
            self._count += 1
            self._refuse_other_gradients(trained)
        finally:
            aside.restore()
        return version

    def _act_all(self, actions: Sequence[Action], agreement: PeerAgreement | None) -> None:
        """Do `actions`; `agreement`: on the newest batch. See [Note: no waiting for all]."""
        newest = self._batches[-1].run.first
        for action in actions:
            if agreement is not None and action.kind == BACKWARD and action.micro_batch >= newest:
                agreement.check()
                agreement = self._mailbox.taken_before = None
            batch = self._batch_of(action.micro_batch)
            with batch.version.in_use():
                self.act(action, self._stage, batch.run, self._mailbox)

    def _begin(self, batch: MicroBatches) -> PeerAgreement:
        """Compare the batch with that of the rank before this one. See [Note: no waiting for all]."""
        numbers, peers = self.cut.numbers_of(batch.parts), self.peers
        agreement = PeerAgreement(peers, numbers, REMEDIES)
        first = self._count * self.micro_batches
        self._mailbox.taken_before = self._rows.position(peers.index, Action(peers.index, FORWARD, first))
        mine = torch.tensor([*numbers.values(), 1], dtype=torch.int64, device=peers.here.device)
        with translated(peers.here, "beginning a batch"):
            if peers.index:
                before = torch.empty_like(mine)
                work = dist.irecv(before, group=peers.group, group_src=peers.index - 1)
                assert work is not None, "this rank is of the group"
                work.wait()
                mine[-1] = int(torch.equal(before, mine))
            if peers.index + 1 < peers.size:
                sent = dist.isend(mine, group=peers.group, group_dst=peers.index + 1)
                self._headers = [*self._headers[-1:], (sent, mine)]
        if not mine[-1]:
            rows = tuple(
                tuple(each for each in row if each.kind == BACKWARD and each.micro_batch < first)
                for row in self._rows.batch(self._count)
            )
            self._mailbox.expect(rows)
            self._act_all(rows[peers.index], None)
            agreement.check()
        return agreement

    def _later_loss(self, is_unequal: ConfigError | None) -> LaterLoss:
        """Send the loss of the newest batch to all ranks; what is returned waits for it."""
        here, newest = self.peers.here, self._batches[-1]
        losses = [newest.run.losses[number] for number in sorted(newest.run.losses)]
        sums = torch.zeros(3, dtype=torch.float64, device=here.device)
        if losses and newest.share:
            sums[0] = newest.run.batch.mean(losses) * newest.share
            sums[1] = newest.share
        sums[2] = is_unequal is not None
        with translated(here, "mean of the loss"):
            work = dist.all_reduce(sums, group=here.group, async_op=True)
        wide = any(each.dtype == torch.float64 for each in self._model.parameters())
        problem = is_unequal or unequal_targets(" on another rank")

        def finish() -> torch.Tensor:
            with translated(here, "mean of the loss"):
                work.wait()
            if float(sums[2]):
                raise problem
            mean = sums[0] / sums[1]
            return mean if wide else mean.float()

        return LaterLoss.of(finish)

    # -- what belongs to what ----------------------------------------------------------------------

    def _batch_of(self, micro_batch: int) -> _OpenBatch:
        return next(each for each in reversed(self._batches) if micro_batch >= each.run.first)

    def _cut_of(self, micro_batch: int) -> CutProgram:
        run = self._batch_of(micro_batch).run
        return run.cuts[micro_batch - run.first]

    def _new_mailbox(self) -> OpenMailbox:
        return OpenMailbox(
            self.peers,
            self.schedule,
            self._rows,
            buffers=lambda message: self.buffers(message, self._cut_of(message.micro_batch)),
        )

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        own = self.own
        assert own is not None, "prepared by the first step"
        return [
            (name, parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and own.is_here(name)
        ]

    # -- refusals ----------------------------------------------------------------------------------

    def _refuse_interrupted(self) -> None:
        if self._interrupted:
            raise ConfigError(
                "fd.step: an earlier step of this pipeline ended in an exception between two batches (plan: "
                "weight_versions = 2), and what was on its way is lost",
                remedy="begin anew: load a checkpoint into a model that was made anew",
            )

    def _refuse_tied(self) -> None:
        own = self.own
        if own is not None and own.tied:
            raise PlanError(
                f"plan: weight_versions = 2 with {own.tied[0][1]!r}, which two ranks of the pipeline use, is not "
                "there yet: their gradients would have to meet in each step",
                remedy="set weight_versions = 1, or cut the model so that one stage uses it",
            )

    def _refuse_other_gradients(self, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise on all ranks if a pass of this one used a parameter itself, and not the version of its batch."""
        found = next((name for name, parameter in trained if parameter.grad is not None), None)
        if found is not None:
            refusal = PlanError(
                f"plan: weight_versions = 2: the model computes with {found!r} not by its module's attribute, so "
                "it cannot be given the weights of a batch",
                remedy="read parameters as attributes of their modules, or set weight_versions = 1",
            )
            raise refused_by_all(refusal)


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"plan: weight_versions = 2: the parameter {name!r} has hooks on its gradient, which another "
                "tensor gets",
                remedy="change gradients between farandole.step and optimizer.step(), or set weight_versions = 1",
            )

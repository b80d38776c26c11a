"""The plan's key `expert`: the experts of a model divided over ranks, in place.

Each rank of the expert group keeps 1/N of the experts of each layer, and trains on samples of its own: everything
else of the model is data parallel over these ranks too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm.batch_weight import BatchWeight
from ...comm.engine.parameters import ReducerOptions
from ...comm.engine.reducer import GradientReducer
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import SAME_PARAMETERS
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ..data.model_changes import class_of
from ..mesh import Mesh
from ..model import Strategy
from ..optim.one_bit_adam import OneBitAdam
from ..optim.step_hooks import StepExchange
from ..split import Split, is_of_expert, split_in_place, split_of
from .dispatch import Placed, Routing
from .expert_ranks import ROW_CODECS, ExpertRanks
from .layer import MixtureOfExperts
from .transformers_experts import divide_experts_module, is_experts_module, prove_experts

_SHOWN = 3


class ExpertParallel(Strategy):
    """The experts of a model, divided over the expert ranks of its mesh."""

    keys = ("expert",)

    def is_asked(self) -> bool:
        """Without a degree too: layers of ours count the tokens of all ranks, for their losses and capacity."""
        return self.mesh.here.size > 1 and (
            super().is_asked()
            or bool(self.call.divided_blocks)
            or any(isinstance(each, MixtureOfExperts) for each in self.model.modules())
        )

    def check(self) -> None:
        """Raise `PlanError` for experts that do not divide, or that need all tokens where a rank has some."""
        _refuse_divided_tokens(self.model, self.call.divided_blocks)
        if self.mesh.size("expert") > 1:
            _refuse_experts(self.model, self.optimizers, self.mesh.size("expert"))

    def apply(self) -> None:
        """Leave this rank its part of them.

        Raises `PlanError`, on all ranks, for experts of transformers that compute something else than is known.
        """
        model, plan, mesh, degree = self.model, self.plan, self.mesh, self.mesh.size("expert")
        ours = [(name, each) for name, each in model.named_modules() if isinstance(each, MixtureOfExperts)]
        meets = degree > 1 or (bool(ours) and mesh.size(*SAME_PARAMETERS) > 1)
        ranks = _ranks_of(plan, mesh, SAME_PARAMETERS) if meets else None
        for name, layer in ours:
            layer.last.is_in_pipeline = mesh.size("pipeline") > 1
            layer.last.name, layer.last.ranks, layer.last.token_ranks = name, ranks, None
        if self.call.divided_blocks and ours:
            # The ranks of a tensor group have other tokens of one batch.
            wider = _ranks_of(plan, mesh, (*SAME_PARAMETERS, "tensor"))
            for _, layer in _layers_in(model, self.call.divided_blocks):
                layer.last.ranks, layer.last.token_ranks = wider, self.call.token_ranks
        if degree > 1 and ranks is not None:
            self._divide_all(ours, ranks)

    def _divide_all(self, ours: Sequence[tuple[str, MixtureOfExperts]], ranks: ExpertRanks) -> None:
        foreign = [(name, each) for name, each in self.model.named_modules() if is_experts_module(each)]
        for name, module in foreign:
            prove_experts(name, module)
        for _, layer in ours:
            _divide(layer.experts, layer.routing.num_experts, self.optimizers, ranks)
        for name, module in foreign:
            count = int(vars(module)["num_experts"])
            _divide(module, count, self.optimizers, ranks)
            divide_experts_module(module, Placed(name, Routing(count, 1), ranks), count // ranks.size)
        if self.mesh.here.rank == 0:
            _report_whole(self.model)


def _ranks_of(plan: Plan, mesh: Mesh, degrees: Sequence[str]) -> ExpertRanks:
    """Return the ranks of one batch: those that differ in `degrees` alone."""
    batch, batch_group = mesh.ranks(*degrees), mesh.group(*degrees)
    group = mesh.group("expert") if mesh.size("expert") > 1 else None
    assert batch_group is not None, f"{mesh} has one rank"
    members = tuple(batch.index(rank) for rank in mesh.ranks("expert"))
    codec = ROW_CODECS[plan.expert_codec]
    return ExpertRanks(mesh.here, group, batch_group, members, mesh.rank(*degrees), codec)


def _layers_in(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, MixtureOfExperts]]:
    inside = tuple(f"{block}." for block in blocks)
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, MixtureOfExperts)]
    return [(name, each) for name, each in found if f"{name}.".startswith(inside or ("\0",))]


def _refuse_divided_tokens(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise `PlanError` for experts in `blocks`, of whose tokens a rank has some of each sample, that need all."""
    for name, layer in _layers_in(model, blocks):
        if layer.routing.capacity_factor is not None:
            raise PlanError(
                f"plan: sequence_parallel = true, but {name} has a capacity, which takes all tokens of a sample "
                "before those of the next, and a rank has some of each",
                remedy="use capacity_factor=None, or leave sequence_parallel out",
            )
    if blocks and getattr(getattr(model, "config", None), "output_router_logits", False):
        raise PlanError(
            "plan: sequence_parallel = true, but the model's loss has one of its routers (output_router_logits = "
            "True), which would be of this rank's tokens alone",
            remedy="set model.config.output_router_logits = False, or leave sequence_parallel out",
        )


def _divide(module: nn.Module, count: int, optimizers: Sequence[Optimizer], ranks: ExpertRanks) -> None:
    own = count // ranks.size
    for parameter in module.parameters():
        if split_of(parameter) is None:
            split = Split(tuple(parameter.shape), 0, ((ranks.rank * own, own),), "expert")
            split_in_place(parameter, split, list(optimizers))


def _refuse_experts(model: nn.Module, optimizers: Sequence[Optimizer], degree: int) -> None:
    """Raise `PlanError` if `model` has no experts, or they do not divide by the degree; nothing is changed."""
    if any(isinstance(each, OneBitAdam) for each in optimizers):
        raise PlanError(
            f"plan: expert = {degree}, but OneBitAdam exchanges momentum among all ranks, and they have "
            "different experts",
            remedy="use torch.optim.Adam, or leave expert out",
        )
    layers = [
        (name, each)
        for name, each in model.named_modules()
        if isinstance(each, MixtureOfExperts) or is_experts_module(each)
    ]
    if not layers:
        near = _not_known(model)
        seen = f"; {', '.join(near[:_SHOWN])} have another form" if near else ""
        raise PlanError(
            f"plan: expert = {degree}, but the model has no mixture of experts that is known{seen}",
            remedy="use farandole.MixtureOfExperts or a model of transformers with experts, or leave expert out",
        )
    for name, each in layers:
        module: Any = each
        count = module.routing.num_experts if isinstance(each, MixtureOfExperts) else module.num_experts
        if count % degree:
            fit = [n for n in range(2, count + 1) if count % n == 0]
            raise PlanError(
                f"plan: expert = {degree} does not divide the {count} experts of {name or 'the model'}",
                remedy=f"set expert to one of {', '.join(map(str, fit))}" if fit else "leave expert out",
            )


def _not_known(model: nn.Module) -> list[str]:
    """Return the modules that seem to be experts and have no form that is known."""
    return [
        f"{name} ({type(each).__name__})"
        for name, each in model.named_modules()
        if type(each).__name__.endswith("Experts")
        and not isinstance(each, MixtureOfExperts)
        and not is_experts_module(each)
    ]


def _report_whole(model: nn.Module) -> None:
    whole = _not_known(model)
    if whole:
        more = f" and {len(whole) - _SHOWN} more" if len(whole) > _SHOWN else ""
        write_notice(f"expert: each rank has all of {', '.join(whole[:_SHOWN])}{more}: this form is not known")


# The exchange of gradients where experts are divided: which parameters travel among which ranks.
#
# See [Note: gradients of experts] in `expert_ranks`: what the reducer of experts takes is weighed already.


class ExpertGradients(Strategy):
    """The gradients of the experts of a rank meet those of the ranks that have the same ones.

    They travel as they are, whatever the plan's codec is.
    """

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Where several ranks have the same experts, and others have other ones."""
        mesh = self.mesh
        return self.distributed.exchanges and mesh.size("expert") > 1 and mesh.size(*_SAME_EXPERTS) > 1

    def apply(self) -> None:
        """Let a reducer of their own exchange them, beside that of all other parameters."""
        part = self.mesh.part(*_SAME_EXPERTS)  # made by all ranks: a stage without experts too
        own = self.distributed
        experts = [(name, each) for name, each in own.parameters_here(self.model) if is_of_expert(each)]
        if not experts:
            return
        part.session.batch_weight = BatchWeight()
        exact = replace(self.plan, codec=NONE, codec_for={}, lossy=False)
        options = ReducerOptions(model=f"{class_of(self.model)}, its experts")
        assert own.exchange is not None, "there are several replicas"
        own.exchange = SeveralExchanges(own.exchange, GradientReducer(part, experts, exact, options))


_SAME_EXPERTS = ("data", "shard", "context")
"""The degrees in which ranks differ that have the same experts."""


# Several exchanges as one, where some parameters of a model meet those of other ranks than the rest does.


class SeveralExchanges:
    """A `StepExchange` of several, of which the first alone has codecs and weighs the batch."""

    def __init__(self, first: StepExchange, *others: StepExchange) -> None:
        self._first, self._all = first, (first, *others)

    @property
    def accumulate(self) -> int:
        """See `StepExchange`."""
        return self._first.accumulate

    @property
    def is_open(self) -> bool:
        """See `StepExchange`."""
        return all(each.is_open for each in self._all)

    @property
    def exchanges_done(self) -> int:
        """See `StepExchange`."""
        return sum(each.exchanges_done for each in self._all)

    @property
    def passes_held(self) -> int:
        """See `StepExchange`."""
        return max(each.passes_held for each in self._all)

    @property
    def share_of_batch(self) -> float:
        """See `StepExchange`."""
        return self._first.share_of_batch

    @property
    def follows_loss_scale(self) -> bool:
        """See `StepExchange`."""
        return self._first.follows_loss_scale

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """See `StepExchange`."""
        self._first.follow_loss_scale(read)

    def flush(self, is_dropped: Callable[[], bool] = lambda: False) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.flush(is_dropped)

    def exchange_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.exchange_written(parameters)

    def note_used(self) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.note_used()

    def note_step(self) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.note_step()

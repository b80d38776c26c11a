"""`fd.distribute`: apply a plan to a model and its optimizers, in place.

Nothing is wrapped: names, `state_dict` keys, `isinstance` checks and the loop stay as they were. What a plan can
ask is a list of strategies, each in the folder of its subject: all that are asked for check the model, then change
it, in the order of the list.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..comm.codecs.registry import choose_codec
from ..comm.collectives import broadcast_optimizer, broadcast_tensors
from ..comm.device.streams import has_streams
from ..comm.engine.parameters import ReducerOptions, device_of, require_dense_parameters
from ..comm.engine.redo import StepRedo
from ..comm.engine.reducer import GradientReducer
from ..comm.world.world import World, world
from ..core.env import read_elastic_settings
from ..core.job_plan import resolve_plan
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.rules import MOST_ZERO, check
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import SyncSpec
from .context.apply import ContextParallel
from .data.balance import SharesOfBatch
from .data.batch_norm import BufferSync, GlobalStatistics
from .data.model_changes import (
    class_of,
    compare_models,
    refuse_renormed,
    refuse_strangers,
    refuse_wrong_kinds,
)
from .data.whole_state import PartsOfState
from .expert.apply_expert import ExpertGradients, ExpertParallel
from .frozen_model import FrozenWeights, stored_tensors
from .global_norm import NormsOfParts
from .instrument.phase_hooks import WatchedPasses
from .instrument.training_facts import PredictedFacts
from .lower_precision import MixedPrecision
from .mesh import make_mesh
from .model import DistributeCall, DistributedModel, Strategy
from .optim.bf16_parameters import Bf16Parameters, widen_parameters
from .optim.disk_states import StatesOnDisk
from .optim.elementwise import DividedSteps
from .optim.one_bit_adam import OneBitAdam
from .optim.step_hooks import MakePolicy, SyncPolicy
from .optimizer_step import OptimizerSteps, RareMeetings
from .pipeline.apply import PipelineParallel
from .recompute import Recompute, stop_recomputing
from .seeds import SeededPasses
from .split import is_of_expert
from .tensor.apply_tensor import TensorParallel
from .train_schedule import StagedTraining
from .zero.shard import FullySharded

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741


@overload
def distribute(
    model: M, optimizer: O, plan: Plan | None = None, *, make_policy: MakePolicy | None = None
) -> tuple[M, O]: ...
@overload
def distribute(
    model: M, optimizer: list[O], plan: Plan | None = None, *, make_policy: MakePolicy | None = None
) -> tuple[M, list[O]]: ...


def distribute(
    model: Any, optimizer: Any, plan: Plan | None = None, *, make_policy: MakePolicy | None = None
) -> tuple[Any, Any]:
    """See `farandole.distribute`. `make_policy`: for plans whose ranks do not agree in every step."""
    here = world()
    optimizers: list[Optimizer] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    refuse_wrong_kinds(model, optimizers, DistributedModel.all())
    device = device_of(list(model.parameters()))
    given, plan = plan, resolve_plan(plan).with_bucket_bytes(on_device=has_streams(device))
    sync = _read_sync(here, plan, has_policy=make_policy is not None)
    facts = {
        "elastic": read_elastic_settings() is not None,
        "one_bit_adam": any(isinstance(each, OneBitAdam) for each in optimizers),
    }
    check({**vars(plan), **facts})
    require_dense_parameters(list(model.named_parameters()))
    refuse_strangers(model, optimizers, DistributedModel.all())
    compare_models(here, model, optimizers, plan, DistributedModel.all_of(here))
    mesh = make_mesh(here, plan)
    if mesh.replicas.size > 1 and (sync.exchanges_gradients or sync.is_server):
        refuse_renormed(model)
    distributed = DistributedModel(plan, mesh)
    _given[model] = given, [weakref.ref(each) for each in optimizers]
    call = DistributeCall(distributed, model, optimizers, given, make_policy)
    asked = []
    for strategy in [kind(call) for kind in STRATEGIES]:
        if strategy.is_asked():
            strategy.check()
            asked.append(strategy)
    distributed.stands_for(model)
    late = [strategy for strategy in asked if strategy.takes_own_parameters]
    try:
        for strategy in asked:
            strategy.prepare()
        if here.size > 1:
            broadcast_tensors(here, stored_tensors([*model.parameters(), *model.buffers()]))
            for each in optimizers:
                broadcast_optimizer(here, each)
        if mesh.size("pipeline") == 1:
            _apply(asked, asked)
        else:
            call.when_cut = partial(_apply, late, asked)
            _apply([strategy for strategy in asked if strategy not in late], [])
    except BaseException:  # what no check could find: a model that is not divided is as it was
        if distributed.is_whole:
            undistribute(model)
        raise
    here.session.stall_seconds = plan.stall_seconds
    return model, optimizer


def _apply(strategies: Sequence[Strategy], to_finish: Sequence[Strategy]) -> None:
    for strategy in strategies:
        strategy.apply()
    for strategy in to_finish:
        strategy.finish()


def undistribute(model: nn.Module) -> None:
    """Undo `distribute`: nothing is exchanged any more, and no hook of ours is left but those that only record.

    To be called by all ranks, between two steps. `model` can be distributed anew, with the same optimizers but at
    ZeRO stages 1 and 2: there each rank has the states of some rows, and they refuse to step.
    """
    distributed = DistributedModel.of(model)
    if distributed.sharded is not None:
        raise ConfigError(
            "undistribute: the parameters of this model are sharded (zero = 3), and its units stay so",
            remedy="save it with farandole.save, and load it into a model that was made anew",
        )
    plan, mesh = distributed.plan, distributed.mesh
    if plan is None or mesh is None:
        return
    if not mesh.degrees.is_data_alone:
        raise ConfigError(
            f"undistribute: this model is divided over ranks ({mesh.degrees}), and stays so",
            remedy="save it with farandole.save, and load it into a model that was made anew",
        )
    distributed.forget(model)
    if distributed.policy is not None:
        distributed.policy.close()
    if distributed.passes is not None:
        distributed.passes.stop()
    if plan.bf16_parameters:
        widen_parameters(model)
    stop_recomputing(model)
    if distributed.reducer is not None:
        distributed.reducer.remove()


_given: weakref.WeakKeyDictionary[nn.Module, tuple[Plan | None, list[weakref.ref[Optimizer]]]]
_given = weakref.WeakKeyDictionary()
"""Plan and optimizers of the last call of `distribute` for a model."""


def distribute_again(model: nn.Module) -> None:
    """Distribute a model that is whole on each rank over the ranks of now; called by all of them alike.

    What codecs keep of it is gone. May be called again where it failed.
    """
    plan, optimizers = _given[model]
    if DistributedModel.of(model).plan is not None:
        undistribute(model)
    distribute(model, [found for each in optimizers if (found := each()) is not None], plan)


def local_policies(here: World) -> list[SyncPolicy]:
    """Return the policies of the models of `here` whose ranks train on their own now."""
    found = [DistributedModel.of(model).policy for model in DistributedModel.all_of(here)]
    return [policy for policy in found if policy is not None and policy.is_local]


class DataParallel(Strategy):
    """Gradients are exchanged while backward runs; at stages 1 and 2 of ZeRO a rank gets its rows of the sums."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Below stage 3, where several ranks have the same parameters and agree in each step."""
        return self.plan.zero < MOST_ZERO and self.distributed.exchanges

    def check(self) -> None:
        """Raise `PlanError` for a codec that a parameter cannot have."""
        if self.distributed.is_whole:  # else it depends on what this rank will have
            for name, parameter in self.model.named_parameters():
                choose_codec(name, parameter, self.plan)

    def apply(self) -> None:
        """Exchange the gradients of all parameters but those of experts that are divided."""
        replicas, own = self.mesh.replicas, self.distributed
        shards = None
        if self.plan.zero:
            assert replicas.group is not None, "a world of one divides nothing"
            shards = DeviceMesh.from_group(replicas.group, replicas.device.type, mesh_dim_names=("shard",))
        named = [(name, each) for name, each in own.parameters_here(self.model) if not is_of_expert(each)]
        options = ReducerOptions(model=class_of(self.model), mesh=shards, is_compared=own.is_whole)
        own.reducer = own.exchange = GradientReducer(replicas, named, self.plan, options)
        here = self.mesh.here
        if self.plan.on_failure == "continue" and here.session.regroup is not None and own.is_whole:
            if here.device.type != "cpu":
                raise PlanError(
                    f'plan: on_failure = "continue" on {here.device.type}: an exchange there cannot be taken back',
                    remedy="leave on_failure out, and use farandole run --restarts 3",
                )
            here.session.keep(StepRedo, lambda: StepRedo(here)).add(own.reducer)
        if self.plan.buffers == "mean":
            own.reducer.add_extra_tensors(BufferSync(replicas, self.model))


STRATEGIES: tuple[type[Strategy], ...] = (
    # - What is refused or changed before ranks have the same values
    SharesOfBatch, DividedSteps, Bf16Parameters, FrozenWeights, StagedTraining,
    # - The model in parts: layers first, then experts in them, then sequences
    TensorParallel, ExpertParallel, ContextParallel, NormsOfParts, SeededPasses,
    # - Who exchanges gradients
    GlobalStatistics, FullySharded, DataParallel, ExpertGradients,
    # - Passes, around all of it
    Recompute, MixedPrecision, PartsOfState, PipelineParallel, WatchedPasses,
    # - Steps
    RareMeetings, StatesOnDisk, OptimizerSteps, PredictedFacts,
)  # fmt: skip
"""In the order in which they are checked and applied; those that take own parameters after a pipeline's cut."""


def _read_sync(here: World, plan: Plan, *, has_policy: bool) -> SyncSpec:
    sync = SyncSpec.parse(plan.sync)
    if not sync.is_every_step and not has_policy:
        raise PlanError(
            f'plan: sync = "{plan.sync}" is for loops that call farandole.distribute themselves',
            remedy="leave sync out of the plan",
        )
    if sync.servers > here.size:
        raise PlanError(
            f'plan: sync = "{plan.sync}": servers = {sync.servers}, expected at most {here.size}, one a rank',
            remedy="set fewer servers, or leave servers out: one on each host",
        )
    return sync

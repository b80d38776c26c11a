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
from torch.optim import Optimizer

from ..comm.autotune.autotuner import Autotuner
from ..comm.collectives import broadcast_optimizer, broadcast_tensors
from ..comm.device.streams import has_streams
from ..comm.gradients.parameters import require_dense_parameters
from ..comm.reducer.accelerators import device_of
from ..comm.reducer.reducer import GradientReducer
from ..comm.world.world import World, world
from ..core.environ.env import read_elastic_settings
from ..core.environ.job_plan import resolve_plan
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.rules import check
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import SyncSpec
from .context.apply import ContextParallel
from .data.balance import SharesOfBatch
from .data.batch_norm import GlobalStatistics
from .data.buffers import BufferSync
from .data.gradients import DataParallel
from .data.model_changes import ModelGuard, compare_models
from .data.refuse_models import refuse_renormed, refuse_strangers, refuse_wrong_kinds
from .data.whole_state import PartsOfState
from .expert.apply_expert import ExpertParallel
from .expert.reducer import ExpertGradients
from .frozen.encode_model import FrozenWeights, stored_tensors
from .global_norm import NormsOfParts
from .instrument.phase_hooks import PolicyHook, WatchedPasses, end_steps_with, watch_optimizer
from .instrument.training_facts import PredictedFacts
from .mesh import make_mesh
from .model import DistributedModel, Setup, Strategy
from .optim.bf16_parameters import Bf16Parameters, widen_parameters
from .optim.disk_states import StatesOnDisk
from .optim.elementwise import DividedSteps
from .optim.one_bit_adam import OneBitAdam
from .optim.other_optimizers import OtherOptimizers
from .optim.step_hooks import BeforeStep, Clipping
from .optim.sync_policy import MakePolicy, SyncPolicy
from .pipeline.apply import PipelineParallel
from .precision.passes import MixedPrecision
from .recompute import Recompute, stop_recomputing
from .seeds import SeededPasses
from .tensor.apply_tensor import TensorParallel
from .train_schedule import StagedTraining
from .zero.fsdp.shard import FullySharded
from .zero.sharded_step import ShardedStep

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
    setup = Setup(distributed, model, optimizers, given, make_policy)
    asked = []
    for strategy in [kind(setup) for kind in STRATEGIES]:
        if strategy.is_asked():
            strategy.check()
            asked.append(strategy)
    for each in asked:
        each.prepare()
    if here.size > 1:
        broadcast_tensors(here, stored_tensors([*model.parameters(), *model.buffers()]))
        for each in optimizers:
            broadcast_optimizer(here, each)
    here.session.stall_seconds = plan.stall_seconds
    late = [each for each in asked if each.takes_own_parameters]
    if mesh.size("pipeline") == 1:
        _apply(asked, asked)
    else:
        setup.when_cut = partial(_apply, late, asked)
        _apply([each for each in asked if each not in late], [])
    distributed.stands_for(model)
    return model, optimizer


def _apply(strategies: Sequence[Strategy], to_finish: Sequence[Strategy]) -> None:
    for each in strategies:
        each.apply()
    for each in to_finish:
        each.finish()


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
    mesh = distributed.mesh
    if mesh is None:
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
    if distributed.rounded_steps is not None:
        widen_parameters(model)
    stop_recomputing(model)
    if distributed.reducer is not None:
        distributed.reducer.remove()


def local_policies(here: World) -> list[SyncPolicy]:
    """Return the policies of the models of `here` whose ranks train on their own now."""
    found = [DistributedModel.of(model).policy for model in DistributedModel.all_of(here)]
    return [policy for policy in found if policy is not None and policy.is_local]


class RareMeetings(Strategy):
    """The plan's `sync`: ranks train on their own between meetings, after the plan's first steps."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Where ranks do not agree in every step; in a world of one where what they agree on is no plain mean."""
        sync = SyncSpec.parse(self.plan.sync)
        is_rare = not sync.is_every_step and (self.mesh.here.size > 1 or not sync.is_plain_mean)
        return self.setup.make_policy is not None and is_rare

    def apply(self) -> None:
        """Let a policy have its turn in each step."""
        own, model, plan, replicas = self.distributed, self.model, self.plan, self.mesh.replicas
        assert self.setup.make_policy is not None, "asked above"
        buffers = BufferSync(replicas, model) if plan.buffers == "mean" else None
        seen = weakref.ref(own)  # which keeps the policy
        end = partial(_end_every_step, seen) if SyncSpec.parse(plan.sync).exchanges_gradients else None
        policy = own.policy = self.setup.make_policy(
            replicas, model, self.optimizers, plan, buffers=buffers, end_every_step=end,
            tuner=partial(_tuner_of, seen),
        )  # fmt: skip
        others = OtherOptimizers(model, self.optimizers, policy)
        own.hooks += [
            *others.hooks,
            model.register_state_dict_pre_hook(PolicyHook(policy.note_state_dict)),
            model.register_load_state_dict_post_hook(PolicyHook(policy.note_loaded)),
        ]


def _end_every_step(seen: weakref.ref[DistributedModel]) -> None:
    distributed = seen()
    if distributed is not None:
        distributed.end_every_step()


def _tuner_of(seen: weakref.ref[DistributedModel]) -> Autotuner | None:
    distributed = seen()
    return None if distributed is None or distributed.reducer is None else distributed.reducer.tuner


class OptimizerSteps(Strategy):
    """Before each step gradients that did not travel yet do, and are clipped; afterwards the step is counted."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Always."""
        return True

    def apply(self) -> None:
        """Hook the optimizers, in the order that a step needs."""
        own, plan, here, model = self.distributed, self.plan, self.mesh.here, self.model
        listener, sharded, passes = own.listener, own.sharded, own.passes
        scale = None if passes is None else passes.scale
        if passes is not None and scale is not None and listener is not None:
            listener.call_after_exchange(passes.look_at_gradients)
            passes.stand_ins = passes.stand_ins if sharded is None else sharded.stand_ins
        guard = ModelGuard(model, None if sharded is None else sharded.stand_ins)
        if listener is not None:
            listener.before_forward = guard.check
        clipping = None
        if plan.clip_norm is not None:
            in_steps = plan.zero == 0 and scale is None and not plan.bf16_parameters
            clipping = Clipping(plan.clip_norm, self.optimizers, own.exchange, in_steps=in_steps)
            own.hooks += clipping.hooks
        steps: list[ShardedStep] = []
        for each in self.optimizers:
            if isinstance(listener, GradientReducer) and isinstance(each, OneBitAdam):
                each.attach(listener, dict(model.named_parameters()))
            watch_optimizer(each, here)
            before = BeforeStep(
                self.mesh.replicas, each, own.exchange, clipping=clipping, scale=scale, model=guard,
                models=DistributedModel.all, policy=own.policy,
            )  # fmt: skip
            own.hooks.append(each.register_step_pre_hook(before))
            if own.policy is not None:
                own.hooks.append(end_steps_with(each, before.meet))
            if clipping is not None:
                own.hooks.append(each.register_step_post_hook(clipping.after))
            if isinstance(listener, GradientReducer) and listener.mesh is not None:
                steps.append(ShardedStep(each, listener, listener.mesh))
            if scale is not None:
                own.hooks.append(each.register_step_post_hook(before.after))
        own.sharded_steps = steps


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

"""`fd.distribute`: apply a plan to a model and its optimizers, in place.

Nothing is wrapped: names, `state_dict` keys, `isinstance` checks and the loop stay as they were. Added are hooks
on parameters, on each optimizer's step (exchange what is held back, clip, count), and hooks that time the passes.
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
from ..comm.reducer.options import ReducerOptions
from ..comm.reducer.reducer import GradientReducer
from ..comm.world.store_sync import require_same
from ..comm.world.world import World, world
from ..core.environ.env import read_elastic_settings
from ..core.environ.job_plan import resolve_plan
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.rules import MOST_ZERO, check
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import SyncSpec
from .data.balance import ask_balance
from .data.batch_norm import convert_sync_batchnorm
from .data.buffers import BufferSync
from .data.model_changes import ModelGuard, class_of, compare_models, shared_with
from .data.refuse_models import refuse_renormed, refuse_strangers, refuse_wrong_kinds
from .data.whole_state import guard_state_dicts
from .divide import check_division, divide_model
from .expert.reducer import make_expert_reducer, shared_parameters
from .frozen.encode_model import encode_frozen, stored_tensors
from .instrument.phase_hooks import PolicyHook, end_steps_with, watch_model, watch_optimizer
from .instrument.training_facts import PredictedFacts
from .mesh import Mesh, make_mesh
from .model import DistributedModel
from .optim.bf16_parameters import narrow_parameters, round_steps, widen_parameters
from .optim.disk_states import reserve_states
from .optim.one_bit_adam import OneBitAdam
from .optim.other_optimizers import OtherOptimizers
from .optim.several_exchanges import SeveralExchanges
from .optim.step_hooks import BeforeStep, Clipping, ScalerWatch
from .optim.sync_policy import MakePolicy, SyncPolicy
from .pipeline.apply import apply_pipeline, parameters_here, saved_elsewhere
from .precision.passes import prepare_precision, start_precision
from .recompute import modules_to_recompute, start_recomputing, stop_recomputing
from .refuse_optimizers import refuse_rows
from .tensor.sequence import put_first
from .train_schedule import begin_schedule
from .zero.fsdp.shard import shard_parameters
from .zero.mesh import init_mesh, shard_shape
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
    _refuse_shared(here, model)
    refuse_rows(here, optimizers, plan)
    if here.size > 1:
        compare_models(here, model, plan)
    mesh = make_mesh(here, plan)
    if mesh.replicas.size > 1 and (sync.exchanges_gradients or sync.is_server):
        refuse_renormed(model)
    ask_balance(here, plan)
    if here.size > 1 and not (_is_whole(mesh, plan) and sync.exchanges_gradients):
        check_division(mesh, model, optimizers, plan)
    predicted = PredictedFacts(here, model, optimizers, plan, given)
    recomputed = modules_to_recompute(model, plan.recompute)
    cast = prepare_precision(model, plan.precision, narrow=plan.bf16_parameters)
    if plan.bf16_parameters:
        narrow_parameters(model)
    encode_frozen(here, model, optimizers, plan)
    on_disk = reserve_states(here, optimizers, plan, shard_shape(here, plan))
    distributed = DistributedModel(plan, mesh)
    begin_schedule(distributed, model, optimizers)
    if here.size > 1:
        _spread(distributed, model, optimizers)
    start_recomputing(recomputed)
    divides = here.size > 1 and (plan.zero > 0 or not mesh.degrees.is_data_alone)
    distributed.passes = start_precision(
        model, plan.precision, cast, optimizers, here, shards=divides, exchanges=mesh.replicas.size > 1
    )
    distributed.stands_for(model)
    if here.size > 1 and not _is_whole(mesh, plan):
        guard_state_dicts(model, mesh.degrees, plan.zero, saved_elsewhere)
    here.session.stall_seconds = plan.stall_seconds
    if mesh.size("pipeline") > 1:
        finish = partial(_finish_pipeline, distributed, model, optimizers, predicted)
        distributed.pipeline = apply_pipeline(mesh, model, optimizers, plan, finish)
        return model, optimizer
    watch = watch_model(model, distributed.listener)
    if make_policy is not None and not sync.is_every_step and (here.size > 1 or not sync.is_plain_mean):
        _make_policy(make_policy, distributed, model, optimizers)
    for each, states in on_disk:
        distributed.hooks += states.attach(each)
    _hook(distributed, model, optimizers)
    for each, states in on_disk:
        states.move_all(each)
    if plan.precision == "fp32":
        for each in optimizers:
            distributed.hooks.append(each.register_step_pre_hook(ScalerWatch(here, watch)))
    predicted.note()
    return model, optimizer


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


def _is_whole(mesh: Mesh, plan: Plan) -> bool:
    """Return whether each rank has all parameters, and one reducer of all ranks their gradients."""
    return plan.zero < MOST_ZERO and mesh.degrees.is_data_alone


def _spread(distributed: DistributedModel, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    plan, mesh = distributed.plan_and_mesh
    here = mesh.here
    groups = [(f"parameters of optimizer {i}", [len(group["params"]) for group in each.param_groups])
              for i, each in enumerate(optimizers)]  # fmt: skip
    kinds = [(f"class of optimizer {i}", type(each).__name__) for i, each in enumerate(optimizers)]
    buffers = [(f"buffer {name!r}", [list(buffer.shape), str(buffer.dtype).removeprefix("torch.")])
               for name, buffer in model.named_buffers()]  # fmt: skip
    # Parameters are compared before any of them moves: by the reducer, if `check_division` has not.
    exchanges = SyncSpec.parse(plan.sync).exchanges_gradients
    if _is_whole(mesh, plan) and exchanges:
        distributed.reducer = _make_reducer(here, model, plan)
    require_same(here, "comparing optimizers and buffers", [*kinds, *groups, *buffers])
    broadcast_tensors(here, stored_tensors([*model.parameters(), *model.buffers()]))
    for each in optimizers:
        broadcast_optimizer(here, each)
    divide_model(distributed, model, optimizers)
    if mesh.size("pipeline") == 1 and exchanges:
        _exchange(distributed, model, optimizers)


def _finish_pipeline(
    distributed: DistributedModel, model: nn.Module, optimizers: Sequence[Optimizer], predicted: PredictedFacts
) -> None:
    """At the first step of a pipeline, when a rank has its own parameters only."""
    _exchange(distributed, model, optimizers)
    watch_model(model, distributed.listener)
    _hook(distributed, model, optimizers)
    predicted.note()


def _exchange(distributed: DistributedModel, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Let the ranks with the same parameters exchange gradients, with the reducer if it is made already."""
    plan, mesh = distributed.plan_and_mesh
    if (replicas := mesh.replicas).size == 1:
        return
    if plan.sync_batch_norm:
        convert_sync_batchnorm(model, replicas)
    if plan.zero == MOST_ZERO:
        shared = {each for _, each in shared_parameters(parameters_here(model))}
        others = [each for each in model.parameters() if each not in shared]
        sharded = shard_parameters(replicas, model, optimizers, plan, copies=mesh.copies, leave=others)
        put_first(model)
        vars(model)["_farandole_sharded"] = distributed.sharded = sharded
    elif distributed.reducer is None:
        distributed.reducer = _make_reducer(replicas, model, plan)
    expert_reducer = make_expert_reducer(mesh, parameters_here(model), plan, class_of(model))
    first = distributed.exchange = distributed.listener
    if expert_reducer is not None:
        assert first is not None, "there are several replicas"
        distributed.exchange = SeveralExchanges(first, expert_reducer)
    if plan.buffers == "mean" and distributed.reducer is not None:
        distributed.reducer.add_extra_tensors(BufferSync(replicas, model))


def _make_policy(
    make: MakePolicy, distributed: DistributedModel, model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Let the ranks train on their own between meetings, after the plan's first steps."""
    plan, mesh = distributed.plan_and_mesh
    buffers = BufferSync(mesh.replicas, model) if plan.buffers == "mean" else None
    seen = weakref.ref(distributed)  # which keeps the policy
    end = partial(_end_every_step, seen) if SyncSpec.parse(plan.sync).exchanges_gradients else None
    policy = distributed.policy = make(
        mesh.replicas, model, optimizers, plan, buffers=buffers, end_every_step=end, tuner=partial(_tuner_of, seen)
    )
    others = OtherOptimizers(model, optimizers, policy)
    distributed.hooks += [
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


def _make_reducer(replicas: World, model: nn.Module, plan: Plan) -> GradientReducer:
    shards = init_mesh(replicas) if plan.zero else None
    options = ReducerOptions(model=class_of(model), mesh=shards)
    return GradientReducer(replicas, shared_parameters(parameters_here(model)), plan, options)


def _hook(distributed: DistributedModel, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    plan, mesh = distributed.plan_and_mesh
    here, listener, sharded = mesh.here, distributed.listener, distributed.sharded
    passes = distributed.passes
    scale = None if passes is None else passes.scale
    if passes is not None and scale is not None and listener is not None:
        listener.call_after_exchange(passes.look_at_gradients)
        passes.stand_ins = passes.stand_ins if sharded is None else sharded.stand_ins
    guard = ModelGuard(model, None if sharded is None else sharded.stand_ins)
    if listener is not None:
        listener.before_forward = guard.check
    in_steps = plan.zero == 0 and scale is None and not plan.bf16_parameters
    exchange, policy, hooks = distributed.exchange, distributed.policy, distributed.hooks
    clipping = (
        None if plan.clip_norm is None else Clipping(plan.clip_norm, optimizers, exchange, in_steps=in_steps)
    )
    hooks += [] if clipping is None else clipping.hooks
    steps: list[ShardedStep] = []
    for each in optimizers:
        if isinstance(listener, GradientReducer) and isinstance(each, OneBitAdam):
            each.attach(listener, dict(model.named_parameters()))
        watch_optimizer(each, here)
        before = BeforeStep(
            mesh.replicas, each, exchange, clipping=clipping, scale=scale, model=guard,
            models=DistributedModel.all, policy=policy,
        )  # fmt: skip
        hooks.append(each.register_step_pre_hook(before))
        if policy is not None:
            hooks.append(end_steps_with(each, before.meet))
        if clipping is not None:
            hooks.append(each.register_step_post_hook(clipping.after))
        if isinstance(listener, GradientReducer) and listener.mesh is not None:
            steps.append(ShardedStep(each, listener, listener.mesh))
        if scale is not None:
            hooks.append(each.register_step_post_hook(before.after))
    distributed.sharded_steps = steps
    if plan.bf16_parameters:
        distributed.rounded_steps = round_steps(optimizers, [step.first_element for step in steps], hooks)


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


def _refuse_shared(here: World, model: nn.Module) -> None:
    """Two reducers would each take the other's mean for a gradient of this rank."""
    shared = shared_with(model, DistributedModel.all_of(here))
    require_same(here, "distribute", [("parameters that another distributed model has too", shared)])
    if shared:
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise ConfigError(
            f"distribute: another distributed model has {', '.join(map(repr, shared[:3]))}{more} too",
            remedy="give one torch.nn.ModuleList of the models that share parameters, and all their optimizers",
        )

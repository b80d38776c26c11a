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
from ..core.environ.job_plan import refuse_elastic, resolve_plan
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.spec import MOST_ZERO, Plan
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
from .optim.bf16_parameters import narrow_parameters, round_steps, widen_parameters
from .optim.disk_states import reserve_states
from .optim.one_bit_adam import OneBitAdam
from .optim.other_optimizers import OtherOptimizers
from .optim.several_exchanges import SeveralExchanges
from .optim.step_hooks import BeforeStep, Clipping, ScalerWatch, StepExchange
from .optim.sync_policy import MakePolicy, SyncPolicy
from .pipeline.apply import apply_pipeline, parameters_here, saved_elsewhere
from .precision.passes import LowerPrecision, prepare_precision, start_precision, stop_precision
from .recompute import modules_to_recompute, start_recomputing, stop_recomputing
from .refuse_optimizers import refuse_codecs_and_optimizers, refuse_one_bit_adam
from .tensor.sequence import put_first
from .train_schedule import begin_schedule, end_schedule
from .zero.fsdp.passes import ShardedModel
from .zero.fsdp.shard import shard_parameters
from .zero.mesh import init_mesh, shard_shape
from .zero.sharded_step import ShardedStep, note_steps

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741

_reducers: weakref.WeakKeyDictionary[nn.Module, GradientReducer] = weakref.WeakKeyDictionary()
_expert_reducers: weakref.WeakKeyDictionary[nn.Module, GradientReducer] = weakref.WeakKeyDictionary()
"""The reducers of experts, where several ranks have the same ones."""
_sharded: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModel]] = weakref.WeakKeyDictionary()
"""What stands for the reducer at ZeRO stage 3; the model keeps it alive."""
_policies: weakref.WeakKeyDictionary[nn.Module, SyncPolicy] = weakref.WeakKeyDictionary()
_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()
_meshes: weakref.WeakKeyDictionary[nn.Module, Mesh] = weakref.WeakKeyDictionary()


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
    refuse_wrong_kinds(model, optimizers, _plans)
    device = device_of(list(model.parameters()))
    given, plan = plan, resolve_plan(plan).with_bucket_bytes(on_device=has_streams(device))
    sync = _read_sync(here, plan, has_policy=make_policy is not None)
    if read_elastic_settings() is not None:
        refuse_elastic(plan)
    require_dense_parameters(list(model.named_parameters()))
    refuse_strangers(model, optimizers, _plans)
    _refuse_shared(here, model)
    refuse_one_bit_adam(optimizers, plan)
    refuse_codecs_and_optimizers(here, optimizers, plan)
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
    begin_schedule(here, model, optimizers, plan)
    if here.size > 1:
        _spread(mesh, model, optimizers, plan)
    start_recomputing(recomputed)
    divides = here.size > 1 and (plan.zero > 0 or not mesh.degrees.is_data_alone)
    passes = start_precision(
        model, plan.precision, cast, optimizers, here, shards=divides, exchanges=mesh.replicas.size > 1
    )
    _plans[model], _meshes[model] = plan, mesh
    if here.size > 1 and not _is_whole(mesh, plan):
        guard_state_dicts(model, mesh.degrees, plan.zero, saved_elsewhere)
    here.session.stall_seconds = plan.stall_seconds
    if mesh.size("pipeline") > 1:
        finish = partial(_finish_pipeline, mesh, model, optimizers, plan, predicted)
        apply_pipeline(mesh, model, optimizers, plan, finish)
        return model, optimizer
    watch = watch_model(model, _exchange_of(model))
    if make_policy is not None and not sync.is_every_step and (here.size > 1 or not sync.is_plain_mean):
        _make_policy(make_policy, mesh, model, optimizers, plan)
    for each, states in on_disk:
        states.attach(each)
    _hook(mesh, model, optimizers, plan, passes)
    for each, states in on_disk:
        states.move_all(each)
    if plan.precision == "fp32":
        for each in optimizers:
            each.register_step_pre_hook(ScalerWatch(here, lambda: watch.in_float16))
    predicted.note()
    return model, optimizer


def reducer_of(model: nn.Module) -> GradientReducer | None:
    """Return the reducer of a distributed model; None in a world of one."""
    return _reducers.get(model)


def sharded_of(model: nn.Module) -> ShardedModel | None:
    """Return the passes of a model whose parameters are sharded (ZeRO stage 3); None for any other."""
    found = _sharded.get(model)
    return None if found is None else found()


def exchange_of(model: nn.Module) -> StepExchange | None:
    """Return what makes the gradients of a distributed model means over its ranks; None in a world of one."""
    first = _exchange_of(model)
    if first is None or model not in _expert_reducers:
        return first
    return SeveralExchanges(first, _expert_reducers[model])


def _exchange_of(model: nn.Module) -> GradientReducer | ShardedModel | None:
    return _reducers.get(model) or sharded_of(model)


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that `distribute` applied to `model`; None when it was never distributed."""
    return _plans.get(model)


def mesh_of(model: nn.Module) -> Mesh | None:
    """Return the mesh of ranks that `model` is distributed over; None when it was never distributed."""
    return _meshes.get(model)


def undistribute(model: nn.Module) -> None:
    """Exchange the gradients of `model` no more, and let it be distributed anew, with another optimizer.

    To be called by all ranks, between two steps. The optimizers that it was distributed with must not step again.
    """
    if sharded_of(model) is not None:
        raise ConfigError(
            "undistribute: the parameters of this model are sharded (zero = 3), and its units stay so",
            remedy="save it with farandole.save, and load it into a model that was made anew",
        )
    mesh = _meshes.get(model)
    if mesh is not None and not mesh.degrees.is_data_alone:
        raise ConfigError(
            f"undistribute: this model is divided over ranks ({mesh.degrees}), and stays so",
            remedy="save it with farandole.save, and load it into a model that was made anew",
        )
    reducer, policy = _reducers.pop(model, None), _policies.pop(model, None)
    _meshes.pop(model, None)
    if policy is not None:
        policy.close()
    if _plans.pop(model, None) is not None:
        stop_precision(model)
        widen_parameters(model)
        stop_recomputing(model)
        end_schedule(model)
    if reducer is not None:
        reducer.remove()


def policy_of(model: nn.Module) -> SyncPolicy | None:
    """Return what lets ranks of `model` train on their own between meetings; None: they agree in every step."""
    return _policies.get(model)


def local_policies(here: World) -> list[SyncPolicy]:
    """Return the policies of the models of `here` whose ranks train on their own now."""
    found = [_policies[model] for model in distributed_here(here) if model in _policies]
    return [policy for policy in found if policy.is_local]


def distributed_models() -> list[nn.Module]:
    """Return the models that `distribute` was called with and that still live."""
    return list(_plans)


def distributed_here(here: World) -> list[nn.Module]:
    """Return the models whose gradients meet now, or would, were there more than one rank."""
    reducers = {model: _exchange_of(model) for model in _plans if _meshes[model].here is here}
    return [model for model, reducer in reducers.items() if reducer is None or reducer.is_open]


def _is_whole(mesh: Mesh, plan: Plan) -> bool:
    """Return whether each rank has all parameters, and one reducer of all ranks their gradients."""
    return plan.zero < MOST_ZERO and mesh.degrees.is_data_alone


def _spread(mesh: Mesh, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    here = mesh.here
    groups = [(f"parameters of optimizer {i}", [len(group["params"]) for group in each.param_groups])
              for i, each in enumerate(optimizers)]  # fmt: skip
    kinds = [(f"class of optimizer {i}", type(each).__name__) for i, each in enumerate(optimizers)]
    buffers = [(f"buffer {name!r}", [list(buffer.shape), str(buffer.dtype).removeprefix("torch.")])
               for name, buffer in model.named_buffers()]  # fmt: skip
    # Parameters are compared before any of them moves: by the reducer, if `check_division` has not.
    exchanges = SyncSpec.parse(plan.sync).exchanges_gradients
    reducer = _make_reducer(here, model, plan) if _is_whole(mesh, plan) and exchanges else None
    require_same(here, "comparing optimizers and buffers", [*kinds, *groups, *buffers])
    broadcast_tensors(here, stored_tensors([*model.parameters(), *model.buffers()]))
    for each in optimizers:
        broadcast_optimizer(here, each)
    divide_model(mesh, model, optimizers, plan)
    if mesh.size("pipeline") == 1 and exchanges:
        _exchange(mesh, model, optimizers, plan, reducer)


def _finish_pipeline(
    mesh: Mesh, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, predicted: PredictedFacts
) -> None:
    """At the first step of a pipeline, when a rank has its own parameters only."""
    _exchange(mesh, model, optimizers, plan, None)
    watch_model(model, _exchange_of(model))
    _hook(mesh, model, optimizers, plan, None)
    predicted.note()


def _exchange(
    mesh: Mesh,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plan: Plan,
    reducer: GradientReducer | None,
) -> None:
    """Let the ranks with the same parameters exchange gradients, with `reducer` if it is made already."""
    if (replicas := mesh.replicas).size == 1:
        return
    if plan.sync_batch_norm:
        convert_sync_batchnorm(model, replicas)
    if plan.zero == MOST_ZERO:
        shared = {each for _, each in shared_parameters(parameters_here(model))}
        others = [each for each in model.parameters() if each not in shared]
        sharded = shard_parameters(replicas, model, optimizers, plan, copies=mesh.copies, leave=others)
        put_first(model)
        vars(model)["_farandole_sharded"], _sharded[model] = sharded, weakref.ref(sharded)
    else:
        _reducers[model] = reducer or _make_reducer(replicas, model, plan)
    expert_reducer = make_expert_reducer(mesh, parameters_here(model), plan, class_of(model))
    if expert_reducer is not None:
        _expert_reducers[model] = expert_reducer
    if plan.buffers == "mean" and model in _reducers:
        _reducers[model].add_extra_tensors(BufferSync(replicas, model))


def _make_policy(
    make: MakePolicy, mesh: Mesh, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan
) -> None:
    """Let the ranks train on their own between meetings, after the plan's first steps."""
    buffers = BufferSync(mesh.replicas, model) if plan.buffers == "mean" else None
    seen_model = weakref.ref(model)
    end = partial(_end_reducer, seen_model) if SyncSpec.parse(plan.sync).exchanges_gradients else None
    policy = _policies[model] = make(
        mesh.replicas, model, optimizers, plan, buffers=buffers, end_every_step=end,
        tuner=partial(_tuner_of, seen_model),
    )  # fmt: skip
    OtherOptimizers(model, optimizers, policy_of)
    model.register_state_dict_pre_hook(PolicyHook(policy.note_state_dict))
    model.register_load_state_dict_post_hook(PolicyHook(policy.note_loaded))


def _tuner_of(seen_model: weakref.ref[nn.Module]) -> Autotuner | None:
    model = seen_model()
    reducer = None if model is None else _reducers.get(model)
    return None if reducer is None else reducer.tuner


def _end_reducer(seen_model: weakref.ref[nn.Module]) -> None:
    model = seen_model()
    reducer = None if model is None else _reducers.pop(model, None)
    if reducer is not None:
        reducer.remove()


def _make_reducer(replicas: World, model: nn.Module, plan: Plan) -> GradientReducer:
    shards = init_mesh(replicas) if plan.zero else None
    options = ReducerOptions(model=class_of(model), mesh=shards)
    return GradientReducer(replicas, shared_parameters(parameters_here(model)), plan, options)


def _hook(
    mesh: Mesh,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plan: Plan,
    passes: LowerPrecision | None,
) -> None:
    here, reducer, sharded = mesh.here, _exchange_of(model), sharded_of(model)
    scale = None if passes is None else passes.scale
    if passes is not None and scale is not None and reducer is not None:
        reducer.call_after_exchange(passes.look_at_gradients)
        passes.stand_ins = passes.stand_ins if sharded is None else sharded.stand_ins
    guard = ModelGuard(model, None if sharded is None else sharded.stand_ins)
    if reducer is not None:
        reducer.before_forward = guard.check
    exchange = exchange_of(model)
    in_steps = plan.zero == 0 and scale is None and not plan.bf16_parameters
    clipping = (
        None if plan.clip_norm is None else Clipping(plan.clip_norm, optimizers, exchange, in_steps=in_steps)
    )
    steps: list[ShardedStep] = []
    for each in optimizers:
        if isinstance(reducer, GradientReducer) and isinstance(each, OneBitAdam):
            each.attach(reducer, dict(model.named_parameters()))
        watch_optimizer(each, here)
        before = BeforeStep(
            mesh.replicas, each, exchange, clipping=clipping, scale=scale, model=guard, models=distributed_models,
            policy=_policies.get(model),
        )  # fmt: skip
        each.register_step_pre_hook(before)
        if model in _policies:
            end_steps_with(each, before.meet)
        if clipping is not None:
            each.register_step_post_hook(clipping.after)
        if isinstance(reducer, GradientReducer) and reducer.mesh is not None:
            steps.append(ShardedStep(each, reducer, reducer.mesh))
        if scale is not None:
            each.register_step_post_hook(before.after)
    note_steps(model, steps)
    if plan.bf16_parameters:
        round_steps(model, optimizers, [step.first_element for step in steps])


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
    shared = shared_with(model, distributed_here(here))
    require_same(here, "distribute", [("parameters that another distributed model has too", shared)])
    if shared:
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise ConfigError(
            f"distribute: another distributed model has {', '.join(map(repr, shared[:3]))}{more} too",
            remedy="give one torch.nn.ModuleList of the models that share parameters, and all their optimizers",
        )

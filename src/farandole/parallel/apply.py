"""`fd.distribute`: apply a plan to a model and its optimizers, in place.

Nothing is wrapped: parameter names, `state_dict` keys, `isinstance` checks and the loop stay as they
were. What is added: the engine's hooks on the parameters, hooks on each optimizer (before a step: exchange what
is held back, clip; after it: count and record the step), and hooks that time the model's passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm.agree import require_same
from ..comm.engine import GradientEngine
from ..comm.parameters import require_dense_parameters
from ..comm.replicate import broadcast_optimizer, broadcast_tensors
from ..comm.world import World, world
from ..core.errors import ConfigError
from ..core.job_plan import resolve_plan
from ..core.spec import Plan
from .batch_norm import synchronise
from .buffers import BufferRider
from .nested_step import is_nested_step
from .one_bit_adam import OneBitAdam
from .phase_hooks import watch_model, watch_optimizer

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741

_engines: weakref.WeakKeyDictionary[nn.Module, GradientEngine] = weakref.WeakKeyDictionary()
_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


@overload
def distribute(model: M, optimizer: O, plan: Plan | None = None) -> tuple[M, O]: ...
@overload
def distribute(model: M, optimizer: list[O], plan: Plan | None = None) -> tuple[M, list[O]]: ...


def distribute(model: Any, optimizer: Any, plan: Plan | None = None) -> tuple[Any, Any]:
    """Make `model` train on all ranks as one process would on the joined batch; return both objects.

    Parameters, buffers and optimizer state become rank 0's. From then on every ``backward()`` ends
    with the mean gradient in ``parameter.grad``. `optimizer` may be a list of several. `plan` is the
    default plan, or what ``farandole run --plan`` gave.

    Raises `ConfigError` for a model or optimizer that cannot be distributed, `PlanError` when the plan
    given here is not the launcher's, and `Mismatch`, on every rank, when the ranks' models differ.
    """
    here = world()
    optimizers: list[Optimizer] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    _refuse_wrong_kinds(model, optimizers)
    plan = resolve_plan(plan)
    parameters = list(model.named_parameters())
    require_dense_parameters(parameters)
    _refuse_strangers(model, optimizers)
    _refuse_clipping(optimizers, plan)
    if here.size > 1:
        _spread(here, model, optimizers, plan)
    _plans[model] = plan
    watch_model(model, _engines.get(model))
    for each in optimizers:
        _hook(here, model, each, plan)
    return model, optimizer


def engine_of(model: nn.Module) -> GradientEngine | None:
    """Return the engine of a distributed model; None in a world of one."""
    return _engines.get(model)


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that `distribute` applied to `model`; None when it was never distributed."""
    return _plans.get(model)


def distributed_models() -> list[nn.Module]:
    """Return the models that `distribute` was called with and that still live."""
    return list(_plans)


def _spread(here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    require_same(
        here, "comparing plans", [(f"plan key {key!r}", value) for key, value in plan.to_mapping().items()]
    )
    groups = [(f"parameters of optimizer {i}", [len(group["params"]) for group in each.param_groups])
              for i, each in enumerate(optimizers)]  # fmt: skip
    kinds = [(f"class of optimizer {i}", type(each).__name__) for i, each in enumerate(optimizers)]
    buffers = [(f"buffer {name!r}", [list(buffer.shape), str(buffer.dtype).removeprefix("torch.")])
               for name, buffer in model.named_buffers()]  # fmt: skip
    if plan.sync_batch_norm:
        synchronise(model, here)
    # The engine compares the parameters, before any of them moves.
    engine = GradientEngine(here, list(model.named_parameters()), plan)
    require_same(here, "comparing optimizers and buffers", [*kinds, *groups, *buffers])
    broadcast_tensors(here, [*model.parameters(), *model.buffers()])
    for each in optimizers:
        broadcast_optimizer(here, each)
    if plan.buffers == "mean":
        engine.add_rider(BufferRider(here, model))
    _engines[model] = engine


def _hook(here: World, model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    engine = _engines.get(model)
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before(stepped: Optimizer, *_: Any) -> None:
        if is_nested_step(stepped):
            return
        if engine is not None:
            engine.flush()
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(mine, plan.clip_norm)

    if engine is not None and isinstance(optimizer, OneBitAdam):
        optimizer.attach(engine, dict(model.named_parameters()))
    leads, here.counts_steps = not here.counts_steps, True
    watch_optimizer(optimizer, here.finish_step if leads else None)
    optimizer.register_step_pre_hook(before)


def _refuse_wrong_kinds(model: Any, optimizers: Sequence[Any]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"distribute: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "distribute: the model is wrapped in DistributedDataParallel",
            remedy="give the bare model; distribute does what the wrapper did",
        )
    if model in _plans:
        raise ConfigError("distribute: this model is distributed already", remedy="call it once a model")
    if not optimizers:
        raise ConfigError("distribute: the list of optimizers is empty")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"distribute: expected a torch.optim.Optimizer, got {type(each).__name__}")


def _refuse_clipping(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    if plan.clip_norm is not None and any(isinstance(each, OneBitAdam) for each in optimizers):
        raise ConfigError(
            f"plan: clip_norm = {plan.clip_norm}, but after its warm-up OneBitAdam exchanges no gradients to clip",
            remedy="leave clip_norm out, or use torch.optim.Adam",
        )


def _refuse_strangers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """An optimizer's parameter outside the model would never meet the other ranks' gradients."""
    known = {id(parameter) for other in (model, *_plans) for parameter in other.parameters()}
    for i, each in enumerate(optimizers):
        strangers = [p for group in each.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise ConfigError(
                f"optimizer {i} holds {len(strangers)} parameters that are not the model's (shapes {shapes})",
                remedy="give one torch.nn.ModuleList of all modules that are trained",
            )

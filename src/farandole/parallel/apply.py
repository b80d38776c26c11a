"""`fd.distribute`: apply a plan to a model and its optimizers, in place.

Nothing is wrapped: parameter names, `state_dict` keys, `isinstance` checks and the loop stay as they
were. What is added: the reducer's hooks on the parameters, hooks on each optimizer (before a step: exchange what
is held back, clip; after it: count and record the step), and hooks that time the model's passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm.collectives.broadcast import broadcast_optimizer, broadcast_tensors
from ..comm.gradients.parameters import require_dense_parameters
from ..comm.reducer.options import ReducerOptions
from ..comm.reducer.reducer import GradientReducer
from ..comm.world.store_sync import require_same
from ..comm.world.world import World, world
from ..core.environ.job_plan import resolve_plan
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.spec import Plan
from .data.batch_norm import convert_sync_batchnorm
from .data.buffers import BufferSync
from .data.model_changes import ModelGuard, shared_with
from .data.model_order import refuse_other_order
from .instrument.phase_hooks import watch_model, watch_optimizer
from .optim.one_bit_adam import OneBitAdam
from .optim.step_hooks import BeforeStep, Clipping

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741

_reducers: weakref.WeakKeyDictionary[nn.Module, GradientReducer] = weakref.WeakKeyDictionary()
_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


@overload
def distribute(model: M, optimizer: O, plan: Plan | None = None) -> tuple[M, O]: ...
@overload
def distribute(model: M, optimizer: list[O], plan: Plan | None = None) -> tuple[M, list[O]]: ...


def distribute(model: Any, optimizer: Any, plan: Plan | None = None) -> tuple[Any, Any]:
    """Make `model` train on all ranks as one process would on the joined batch.

    Parameters, buffers and optimizer state are broadcast from rank 0. After every ``backward()``,
    ``parameter.grad`` is the mean over the samples of all ranks. The model is changed in place and not wrapped.

    Args:
        model: the module to train, the same on all ranks.
        optimizer: its optimizer, or a list of several.
        plan: configuration of the exchange; by default the plan of ``farandole run --plan`` and ``--set``.

    Returns:
        The same two objects, `model` and `optimizer`.

    Raises:
        ConfigError: the model or the optimizer cannot be distributed.
        PlanError: `plan` contradicts the launcher's plan, or does not fit this model or world.
        Mismatch: the ranks' models differ; raised on every rank.
    """
    here = world()
    optimizers: list[Optimizer] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    _refuse_wrong_kinds(model, optimizers)
    plan = resolve_plan(plan)
    parameters = list(model.named_parameters())
    require_dense_parameters(parameters)
    _refuse_strangers(model, optimizers)
    _refuse_shared(here, model)
    _refuse_clipping(optimizers, plan)
    if here.size > 1:
        _spread(here, model, optimizers, plan)
    _plans[model] = plan
    here.session.stall_seconds = plan.stall_seconds
    watch_model(model, _reducers.get(model))
    _hook(here, model, optimizers, plan)
    return model, optimizer


def reducer_of(model: nn.Module) -> GradientReducer | None:
    """Return the reducer of a distributed model; None in a world of one."""
    return _reducers.get(model)


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that `distribute` applied to `model`; None when it was never distributed."""
    return _plans.get(model)


def undistribute(model: nn.Module) -> None:
    """Exchange the gradients of `model` no more, and let it be distributed anew, with another optimizer.

    To be called by all ranks, between two steps. The optimizers that it was distributed with must not step again.
    """
    reducer = _reducers.pop(model, None)
    _plans.pop(model, None)
    if reducer is not None:
        reducer.remove()


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
    trains = [(f"parameter {name!r}", "trains" if parameter.requires_grad else "frozen")
              for name, parameter in model.named_parameters()]  # fmt: skip
    one = ("parameters that are one under several names", _tied(model))
    require_same(here, "comparing models", [("class of the model", _class_of(model)), one, *trains])
    refuse_other_order(here, model)
    if plan.sync_batch_norm:
        convert_sync_batchnorm(model, here)
    # The reducer compares the parameters, before any of them moves.
    options = ReducerOptions(model=_class_of(model))
    reducer = GradientReducer(here, list(model.named_parameters()), plan, options)
    require_same(here, "comparing optimizers and buffers", [*kinds, *groups, *buffers])
    broadcast_tensors(here, [*model.parameters(), *model.buffers()])
    for each in optimizers:
        broadcast_optimizer(here, each)
    if plan.buffers == "mean":
        reducer.add_extra_tensors(BufferSync(here, model))
    _reducers[model] = reducer


def _class_of(model: nn.Module) -> str:
    kind = type(model)
    return kind.__qualname__.rpartition(".")[2]


def _tied(model: nn.Module) -> list[str]:
    """Return, of each parameter that has several names, these."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [" = ".join(several) for several in names.values() if len(several) > 1]


def _hook(here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    reducer = _reducers.get(model)
    guard = ModelGuard(model)
    if reducer is not None:
        reducer.before_forward = guard.check
    clipping = None if plan.clip_norm is None else Clipping(plan.clip_norm, optimizers, reducer)
    for each in optimizers:
        if reducer is not None and isinstance(each, OneBitAdam):
            each.attach(reducer, dict(model.named_parameters()))
        watch_optimizer(each, here)
        each.register_step_pre_hook(
            BeforeStep(here, each, reducer, clipping=clipping, model=guard, models=distributed_models)
        )


def _refuse_wrong_kinds(model: Any, optimizers: Sequence[Any]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"distribute: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "distribute: the model is wrapped in DistributedDataParallel",
            remedy="give the bare model; distribute does what the wrapper did",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"distribute: the model is scripted (a {type(model).__name__}), and takes no hooks",
            remedy="give the module that was scripted",
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


def _refuse_shared(here: World, model: nn.Module) -> None:
    """Two reducers would each take the other's mean for a gradient of this rank."""
    shared = shared_with(model, _distributed_here(here))
    require_same(here, "distribute", [("parameters that another distributed model has too", shared)])
    if shared:
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise ConfigError(
            f"distribute: another distributed model has {', '.join(map(repr, shared[:3]))}{more} too",
            remedy="give one torch.nn.ModuleList of the models that share parameters, and all their optimizers",
        )


def _distributed_here(here: World) -> list[nn.Module]:
    """Return the models whose gradients meet now, or would, were there more than one rank."""
    reducers = {model: _reducers.get(model) for model in _plans}
    return [
        model for model, reducer in reducers.items()
        if (here.size == 1 if reducer is None else reducer.is_open and reducer.world is here)
    ]  # fmt: skip


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

"""What comes to a model after `fd.distribute`: parameters that no other rank sees, and wrappers that exchange too.

A module that is assigned or added, `load_state_dict(assign=True)`, an optimizer's `add_param_group`. torch has
hooks for every parameter and module that gets a name, so a model is looked through only after one did.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...comm.engine.parameters import ParameterTable
from ...comm.messages import bytes_of
from ...comm.world.session import Agreed
from ...comm.world.store_sync import Fact, all_gather_json, require_same
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError, Mismatch
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks

# Whether ranks distribute the same models by the same plan, in the same order.
#
# Two models could be alike in class and shapes. Models are seeded alike on all ranks, as a rule. Then two that
# change places are known by their first values: this rank's is the one that rank 0 had in another call. Where
# every rank draws values of its own, nothing is known.

_ELEMENTS = 1024
"""Elements of each parameter that are compared."""
_PARAMETERS = 32


class _Digests(list[list[str]], Agreed):
    """The digests of the ranks' models, for each call."""


def _refuse_other_order(here: World, now: list[str]) -> None:
    """Raise `Mismatch` when a rank's model is another one of rank 0's. `now`: the digests of the ranks' models."""
    earlier = here.session.keep(_Digests, _Digests)
    for call, then in enumerate(earlier, start=1):
        swapped = [rank for rank in range(here.size) if (now[rank], then[rank]) == (then[0], now[0])]
        if swapped and now[0] != then[0]:
            raise Mismatch(
                f"models {call} and {len(earlier) + 1} were distributed in another order by {name_ranks(swapped)} "
                "than by rank 0",
                rank=here.job_rank,
                operation="comparing models",
                remedy="call farandole.distribute for the same models in the same order on every rank",
            )
    earlier.append(now)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in list(model.parameters())[:_PARAMETERS]:
        first = parameter.detach().reshape(-1)[:_ELEMENTS].cpu()
        digest.update(bytes_of(first).numpy().data)
    return digest.hexdigest()[:16]


def compare_models(
    here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, distributed: Sequence[nn.Module]
) -> None:
    """Raise `Mismatch`, on every rank, where the ranks' plans, models, optimizers or their order differ.

    Raises `ConfigError` for tensors that cannot be written to any more, and for parameters that one of the models
    in `distributed` has too. One small message a rank where all is well.
    """
    shared = shared_with(model, distributed)
    if here.size == 1:
        _refuse_unfit([], shared)
        return
    named = list(model.named_parameters())
    tensors = [*named, *model.named_buffers()]
    made = [name for name, each in tensors if each.is_inference()]
    of_plan = [(f"plan key {key!r}", value) for key, value in plan.to_mapping().items()]
    of_model: list[Fact] = [
        ("parameters that another distributed model has too", shared),
        ("class of the model", class_of(model)),
        ("parameters that are one under several names", tied_names(model)),
        ("tensors that were made in torch.inference_mode()", made),
        *((f"parameter {name!r}", "trains" if each.requires_grad else "frozen") for name, each in named),
    ]
    of_parameters = ParameterTable(named).describe()
    of_others: list[Fact] = [
        *((f"class of optimizer {i}", type(each).__name__) for i, each in enumerate(optimizers)),
        *((f"parameters of optimizer {i}", [len(group["params"]) for group in each.param_groups])
          for i, each in enumerate(optimizers)),
        *((f"buffer {name!r}", [list(each.shape), str(each.dtype).removeprefix("torch.")])
          for name, each in model.named_buffers()),
    ]  # fmt: skip
    text = json.dumps([of_plan, of_model, of_parameters, of_others])
    said = all_gather_json(here, "comparing models", [hashlib.sha256(text.encode()).hexdigest(), _digest(model)])
    differs = len({facts for facts, _ in said}) > 1
    if differs:
        require_same(here, "comparing plans", of_plan)
        require_same(here, "comparing models", of_model)
    _refuse_unfit(made, shared)
    _refuse_other_order(here, [digest for _, digest in said])
    if differs:
        require_same(here, "comparing parameters", of_parameters)
        require_same(here, "comparing optimizers and buffers", of_others)
        raise AssertionError("comparing models: digests differ but no fact does")


def _refuse_unfit(made: Sequence[str], shared: Sequence[str]) -> None:
    """Raise `ConfigError` for tensors that cannot take values, and parameters that two models would exchange."""
    if shared:  # two reducers would each take the other's mean for a gradient of this rank
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise ConfigError(
            f"distribute: another distributed model has {', '.join(map(repr, shared[:3]))}{more} too",
            remedy="give one torch.nn.ModuleList of the models that share parameters, and all their optimizers",
        )
    if made:
        raise ConfigError(
            f"distribute: {', '.join(map(repr, made[:3]))} was made in torch.inference_mode(), and cannot take "
            "the values of rank 0",
            remedy="make the model outside of it, or replace the tensor by its clone()",
        )


def class_of(model: nn.Module) -> str:
    """Return the name of a model's class, for messages."""
    kind = type(model)
    return kind.__qualname__.rpartition(".")[2]


def tied_names(model: nn.Module) -> list[str]:
    """Return, of each parameter that has several names, these."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [" = ".join(several) for several in names.values() if len(several) > 1]


_REMEDY = "change the model first and call farandole.distribute then; load states without assign=True"


class _Registrations:
    """How often a module or parameter got a name in this process."""

    def __init__(self) -> None:
        self.count = 0
        register_module_parameter_registration_hook(self._note)
        register_module_module_registration_hook(self._note)

    def _note(self, *_: object) -> None:
        self.count += 1


@cache
def _registrations() -> _Registrations:
    return _Registrations()


class ModelGuard:
    """Knows the parameters that a model had when it was distributed."""

    def __init__(self, model: nn.Module, stand_ins: Callable[[], Iterable[torch.Tensor]] | None = None) -> None:
        """`stand_ins`: of a model that `distribute` shards, what takes the parameters' place while it runs."""
        self._model = weakref.ref(model)
        self._stand_ins = stand_ins
        self._parameters = list(model.parameters())  # held, so that no other one gets the id
        self._known = set(map(id, self._parameters))
        self._looked_at = -1

    def check(self) -> None:
        """Raise `ConfigError` when the model has a parameter that it had not, or a wrapper of torch's.

        Parameters are looked through only after a change.
        """
        model = self._model()
        if model is None:
            return
        _refuse_ddp(model)
        count = _registrations().count
        if count == self._looked_at:
            return
        known = set(self._known)
        if self._stand_ins is None:
            _refuse_fsdp(model)
        else:
            known.update(map(id, self._stand_ins()))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and isinstance(parameter, nn.Parameter) and id(parameter) not in known:
                raise ConfigError(
                    f"parameter {name!r} came into the model after farandole.distribute, so its gradient would "
                    "stay this rank's own",
                    remedy=_REMEDY,
                )
        self._looked_at = count


def _refuse_ddp(model: nn.Module) -> None:
    """Refuse a model that is used inside of torch's wrapper, which would exchange its gradients a second time."""
    active = DistributedDataParallel._get_active_ddp_module()
    if active is not None and any(module is model for module in active.modules()):
        raise ConfigError(
            f"this {type(model).__name__} went through farandole.distribute, and is wrapped in "
            "DistributedDataParallel too: each gradient would be exchanged twice",
            remedy="leave DistributedDataParallel out; distribute does what the wrapper does",
        )


def _refuse_fsdp(model: nn.Module) -> None:
    """Refuse a model whose parameters FSDP has taken: fully_shard, and the wrapper before it, mark modules."""
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules()):
        raise ConfigError(
            f"this {type(model).__name__} went through farandole.distribute, and FSDP (fully_shard or "
            "FullyShardedDataParallel) has taken its parameters since: gradients would not be exchanged as asked",
            remedy="leave FSDP out, or leave distribute out and record the run with farandole.record(model, "
            "optimizer)",
        )


class OptimizerGuard:
    """Knows the parameters that an optimizer had when its model was distributed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._held = _parameters_of(optimizer)
        self._ids = list(map(id, self._held))

    def check(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        """Raise `ConfigError` when `optimizer` has a new parameter that belongs to none of `models`."""
        now = _parameters_of(optimizer)
        if list(map(id, now)) == self._ids:
            return
        known = {id(parameter) for model in models for parameter in model.parameters()} | set(self._ids)
        strangers = [tuple(p.shape) for p in now if id(p) not in known]
        if strangers:
            shapes = ", ".join(map(str, strangers[:3]))
            raise ConfigError(
                f"after distribute the optimizer was given {len(strangers)} parameters (shapes {shapes}) "
                "that no distributed model has, so their gradients would stay this rank's own",
                remedy=_REMEDY,
            )
        self._held, self._ids = now, list(map(id, now))


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shared_with(model: nn.Module, others: Sequence[nn.Module]) -> list[str]:
    """Return the names of the parameters of `model` that one of `others` has too."""
    theirs = {id(parameter) for other in others for parameter in other.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in theirs]


# What `fd.distribute` was given and cannot take, by name.


def refuse_wrong_kinds(model: Any, optimizers: Sequence[Any], distributed: Collection[nn.Module]) -> None:
    """Raise `ConfigError` for what is no model, or no optimizer. `distributed`: the models that are already."""
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
    if model in distributed:
        raise ConfigError("distribute: this model is distributed already", remedy="call it once a model")
    if not optimizers:
        raise ConfigError("distribute: the list of optimizers is empty")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"distribute: expected a torch.optim.Optimizer, got {type(each).__name__}")


def refuse_renormed(model: nn.Module) -> None:
    """Raise `ConfigError` for layers whose forward pass changes parameters, on each rank by its own batch."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"distribute: {name or 'the model'!r} is {type(module).__name__} with max_norm={module.max_norm}: "
                "its forward pass changes the rows that it reads, which are others on each rank",
                remedy="make it without max_norm, and after each step, under torch.no_grad(): "
                f"weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm:g}))",
            )


def refuse_strangers(
    model: nn.Module, optimizers: Sequence[Optimizer], distributed: Collection[nn.Module]
) -> None:
    """An optimizer's parameter outside the model would never meet the other ranks' gradients."""
    known = {id(parameter) for other in (model, *distributed) for parameter in other.parameters()}
    for i, each in enumerate(optimizers):
        strangers = [p for group in each.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise ConfigError(
                f"optimizer {i} holds {len(strangers)} parameters that are not the model's (shapes {shapes})",
                remedy="give one torch.nn.ModuleList of all modules that are trained",
            )

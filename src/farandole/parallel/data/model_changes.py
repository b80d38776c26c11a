"""What comes to a model after `fd.distribute`: parameters that no other rank sees, and wrappers that exchange too.

A module that is assigned or added, `load_state_dict(assign=True)`, an optimizer's `add_param_group`. torch has
hooks for every parameter and module that gets a name, so a model is looked through only after one did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...core.vocabulary.errors import ConfigError

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

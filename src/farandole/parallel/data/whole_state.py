"""A state dict of the whole model, given to a model that is divided over ranks: refused with what to do instead.

What `state_dict()` of a divided model gives on a rank, this rank's parts, is loaded as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.spec import Plan
from ..split import split_of

_DEGREES = ("pipeline", "tensor", "expert", "zero")


class WholeStateGuard:
    """A pre-hook of ``load_state_dict``. A copy of it, made with a copy of its model, refuses nothing that fits.

    Args:
        plan: by which the model is divided.
        elsewhere: returns the whole shapes of parameters that other stages of a pipeline have, by name.
    """

    def __init__(self, plan: Plan, elsewhere: Callable[[nn.Module], Mapping[str, tuple[int, ...] | None]]) -> None:
        self._plan = plan
        self._elsewhere = elsewhere

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *others: Any, **keywords: Any
    ) -> None:
        """Raise `ConfigError` where `state` has all of a parameter of which this rank has a part, or nothing."""
        elsewhere = self._elsewhere(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            whole, has = _whole_shape(parameter, elsewhere.get(name))
            if whole is not None and tuple(value.shape) == whole:
                asked = [f"{key} = {getattr(self._plan, key)}" for key in _DEGREES if getattr(self._plan, key) > 1]
                raise ConfigError(
                    f"load_state_dict: the state has the whole of {name!r}, {list(whole)}, this rank has {has}: "
                    f"the model is divided over ranks (plan: {', '.join(asked)})",
                    remedy="load it before fd.distribute; or make a checkpoint of the file (farandole checkpoint "
                    "convert FILE DIRECTORY --from torch) and call fd.load(DIRECTORY, model) on all ranks",
                )


def _whole_shape(
    parameter: torch.Tensor, of_another_stage: tuple[int, ...] | None
) -> tuple[tuple[int, ...] | None, str]:
    """Return the shape of the parameter if this rank does not have all of it, and what it has."""
    if of_another_stage is not None:
        return of_another_stage, "nothing of it"
    split = split_of(parameter)
    if split is not None and tuple(split.shape) != tuple(parameter.shape):
        return tuple(split.shape), f"{list(parameter.shape)} of it"
    if isinstance(parameter, DTensor):
        return tuple(parameter.shape), f"{list(parameter.to_local().shape)} of it"
    return None, ""

"""State dicts of a model that is divided over ranks: parts are not written as if they were whole, nor the reverse.

What `state_dict()` of a divided model gives on a rank are this rank's parts. It can be read, copied and loaded as
ever. Pickled it would be a file of one rank's part that looks like a whole one: that raises, and so does
transformers' ``save_pretrained``. A state dict of the whole model is refused by `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...core.vocabulary.errors import ConfigError
from ..model import DistributedModel, Strategy
from ..split import split_of

_DEGREES = ("pipeline", "tensor", "expert")


class PartsOfState(Strategy):
    """Parts of a model that a plan divides are not taken for whole, and whole ones not for parts."""

    def is_asked(self) -> bool:
        """Where a rank has not all parameters."""
        return self.mesh.here.size > 1 and not self.distributed.is_whole

    def apply(self) -> None:
        """Refuse it from now on."""
        divided = {**{name: self.mesh.size(name) for name in _DEGREES}, "zero": self.plan.zero}
        asked = ", ".join(f"{key} = {value}" for key, value in divided.items() if value > 1)
        self.model.register_load_state_dict_pre_hook(WholeStateGuard(asked))
        for module in self.model.modules():
            module.register_state_dict_post_hook(partial(_mark_parts, _Part(asked)))
            if callable(getattr(module, "save_pretrained", None)):
                vars(module)["save_pretrained"] = MethodType(_save_pretrained, module)


class _Part:
    """What refuses to be written: an attribute of a state dict, and of each part in it."""

    def __init__(self, asked: str) -> None:
        self._asked = asked

    def __deepcopy__(self, memo: object) -> _Part:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse()

    def refuse(self, *_: object) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(
            f"this is one rank's part of a model that is divided over ranks (plan: {self._asked}), and "
            "a file of it would look like the whole",
            remedy="call farandole.save(DIRECTORY, model) on all ranks; farandole checkpoint export or convert "
            "make one file of it",
        )


def _mark_parts(part: _Part, module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    """A post-hook of ``state_dict``, for the parameters that are the module's own."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if parameter is None or value is None or not _is_part(parameter):
            continue
        with suppress(AttributeError):  # a plain dict that the caller has given
            state._farandole_part = part
        if not isinstance(value, nn.Parameter):
            value.__reduce_ex__ = part.refuse


def _is_part(parameter: torch.Tensor) -> bool:
    """Return whether this rank has not all of it; parameters of other stages are left without elements."""
    return _whole_shape(parameter, None)[0] is not None or not parameter.numel()


def _save_pretrained(self: Any, *arguments: Any, **named: Any) -> Any:
    """Refuse to write one rank's part; a whole state that is given goes to the method of the model's class."""
    given = [each for each in (*arguments, named.get("state_dict")) if isinstance(each, Mapping)]
    part = getattr(given[0] if given else self.state_dict(), "_farandole_part", None)
    if part is not None:
        part.refuse()
    return type(self).save_pretrained(self, *arguments, **named)


class WholeStateGuard:
    """A pre-hook of ``load_state_dict``. A copy of it, made with a copy of its model, refuses nothing that fits.

    Args:
        asked: the keys of the plan that divide the model, in words.
    """

    def __init__(self, asked: str) -> None:
        self._asked = asked

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *others: Any, **keywords: Any
    ) -> None:
        """Raise `ConfigError` where `state` has all of a parameter of which this rank has a part, or nothing."""
        elsewhere = DistributedModel.of(module).saved_elsewhere()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            whole, has = _whole_shape(parameter, elsewhere.get(name))
            if whole is not None and tuple(value.shape) == whole:
                raise ConfigError(
                    f"load_state_dict: the state has the whole of {name!r}, {list(whole)}, this rank has {has}: "
                    f"the model is divided over ranks (plan: {self._asked})",
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

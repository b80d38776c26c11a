"""Modules whose class is changed in place: to a kin of the same name, whose copies are of the plain class.

What a plan does to a module (statistics of all ranks, recomputation, autocast) belongs to this object and its
ranks. Names, `state_dict` keys and `isinstance` checks stay; a copy, or one from a file, is of the plain class.
"""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import Any, cast

import torch
from torch import nn

from ..core.vocabulary.errors import ConfigError

_NAMES = ("__module__", "__qualname__")


class ChangedClass(nn.Module):
    """The first base of every kin."""

    plain_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = plain_class_of(self)
        if not _has_own_form(kind):
            state = {name: value for name, value in vars(self).items() if not name.startswith("_farandole")}
            return (_blank, (kind,), state)
        changed, this = type(self), cast(Any, self)
        own = {name: vars(self).pop(name) for name in list(vars(self)) if name.startswith("_farandole")}
        this.__class__ = kind
        try:
            return this.__reduce_ex__(protocol)
        finally:
            this.__class__ = changed
            vars(self).update(own)


def _has_own_form(kind: type[nn.Module]) -> bool:
    """Return whether the class says by itself how it is copied and saved."""
    methods = ("__reduce_ex__", "__reduce__", "__getstate__")
    return any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in methods)


@lru_cache(maxsize=512)
def make_kin(base: type[Any], kind: type[Any]) -> type[Any]:
    """Return the kin of `kind` whose forward pass is that of `base`, with the signature of its own."""

    @wraps(kind.forward)
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return base.forward(self, *arguments, **named)

    members = {"plain_class": kind, "forward": forward, "__doc__": kind.__doc__}
    return type(kind.__name__, (base, kind), members | {each: getattr(kind, each) for each in _NAMES})


def plain_class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that `module` had before any change of ours."""
    kind: type[nn.Module] = type(module)
    while issubclass(kind, ChangedClass):
        kind = kind.plain_class
    return kind


def is_transposed(layer: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D: a linear layer whose weight is [in, out]."""
    kind = plain_class_of(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer, torch's or transformers'."""
    names = ("nx", "nf") if is_transposed(layer) else ("in_features", "out_features")
    inputs, outputs = (int(getattr(layer, name)) for name in names)
    return inputs, outputs


def change_class(module: nn.Module, kin: type[nn.Module], why: str) -> None:
    """Let `module` be of class `kin` from now on; `why` names the plan's key in errors.

    Raises `ConfigError` for a module whose `forward` is no method of its class: a kin's would not be called.
    """
    require_changeable(module, why)
    try:
        set_class(module, kin)
    except TypeError as problem:
        raise ConfigError(f"{why}: the class of this {type(module).__qualname__} is fixed: {problem}") from None


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let `module` be of class `kind`."""
    module.__class__ = kind


def require_changeable(module: nn.Module, why: str) -> None:
    """Raise `ConfigError` for a module that `change_class` refuses."""
    name = type(module).__qualname__
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"{why}: {name} is scripted", remedy="give the module that was scripted")
    if "forward" in vars(module):
        raise ConfigError(
            f"{why}: the forward of this {name} was replaced on the object, by the script or another library",
            remedy="replace it in the class, or let only one library change it",
        )


def _blank(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)

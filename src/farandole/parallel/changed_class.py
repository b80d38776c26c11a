"""Modules whose class is changed in place: to a kin of the same name, whose copies are of the plain class.

What a plan does to a module (statistics of all ranks, recomputation, autocast) belongs to this object and its
ranks. Names, `state_dict` keys and `isinstance` checks stay; a copy, or one from a file, is of the plain class.
"""

from __future__ import annotations

from collections import Counter
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


# The repeated blocks of a model, such as layers of a transformer: what is recomputed or sharded at once.
#
# One definition for all who ask: recomputation, sharding of parameters, and the estimate of memory.


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of `model` with their names, in the order of `named_modules`.

    A block is an entry of an `nn.ModuleList` or `nn.Sequential` that holds parameters and further modules, at the
    outermost place that has at least two such entries: of a ResNet its bottlenecks, of a transformer its layers.
    An entry that is itself a list or a sequence stands for its entries. But an `nn.Sequential` of single layers is
    a block where an `nn.ModuleList` has several with the same kinds of layers. Without blocks the list is empty.
    """
    found: dict[nn.Module, str] = {}
    for name, block in _blocks_in(model, ""):
        found.setdefault(block, name)
    return [(name, block) for block, name in found.items()]


def _blocks_in(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    entries = [(name, child) for name, child in module.named_children() if _is_block(child)]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(entries) > 1
    stacks = [child for _, child in entries if isinstance(child, nn.Sequential)]
    alike = Counter(map(_layers, stacks if isinstance(module, nn.ModuleList) else ()))
    found: list[tuple[str, nn.Module]] = []
    for name, child in entries:
        path = f"{prefix}{name}"
        inside = [(path, child)]
        if not is_list or isinstance(child, (nn.ModuleList, nn.Sequential)):
            inside = _blocks_in(child, f"{path}.") or (inside if alike[_layers(child)] > 1 else [])
        found += inside
    return found


def _layers(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return what `module` holds, by names: those of classes stay where a plan changes classes in place."""
    return tuple((name, type(each).__name__) for name, each in module.named_modules() if name)


def _is_block(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and next(module.children(), None) is not None

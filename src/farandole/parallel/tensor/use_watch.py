"""Uses of split parameters outside of their layers, which know that they are split: an error.

``functional.linear(x, model.embedding.weight)`` would compute with this rank's part alone. The first forward
pass of the model is watched by a torch function mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...core.vocabulary.errors import PlanError
from ..split import split_of
from .clone import OwnHook
from .layers.regions import DEGREE
from .layers.split_layers import inside

_T = torch.Tensor
_FACTS = {
    _T.size, _T.dim, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex, _T.element_size, _T.data_ptr,
    _T.stride, _T.is_contiguous, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.__hash__,
    torch.is_floating_point, torch.is_complex, torch.numel, _T.is_inference, torch.is_inference,
}  # fmt: skip
"""What does not depend on values."""


class _Watch(TorchFunctionMode):
    def __init__(self, names: WeakIdKeyDictionary) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_compiled = isinstance(function, torch._ops.OpOverload)  # of a graph, in which layers are not seen
        is_fact = function in _FACTS or getattr(function, "__name__", "") == "__get__"
        if not (inside.depth or is_compiled or is_fact):
            for each in (*args, *kwargs.values()):
                if isinstance(each, nn.Parameter) and each in self.names:
                    raise _used_outside(self.names[each], function)
        return function(*args, **kwargs)


def _used_outside(name: str, function: Any) -> PlanError:
    what = getattr(function, "__name__", str(function))
    return PlanError(
        f"tensor: {name!r}, of which each rank has a part, goes to {what!r} outside of its layer",
        remedy=f'call the layer, or leave it whole: tensor_recipe = {{ "{name.rpartition(".")[0]}" = "whole" }}',
    )


class _BeginWatch(OwnHook):
    def __init__(self, names: WeakIdKeyDictionary) -> None:
        self.watch = _Watch(names)
        self.is_watching = self.is_done = False

    def __reduce__(self) -> Any:
        """A copy watches nothing: its class is the plain one, or the split layer's by itself."""
        return (_watch_nothing, ())

    def __call__(self, model: nn.Module, args: Any) -> None:
        if not self.is_watching and not self.is_done:
            self.is_watching = True
            self.watch.__enter__()


class _EndWatch(OwnHook):
    def __init__(self, begin: _BeginWatch) -> None:
        self.begin = begin

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.begin.is_watching:
            self.begin.is_watching = False
            self.begin.watch.__exit__(None, None, None)
            self.begin.is_done = True  # its hooks stay: torch goes through them while an error passes


def _watch_nothing() -> _BeginWatch:
    made = _BeginWatch(WeakIdKeyDictionary())
    made.is_done = True
    return made


def watch_first_forward(model: nn.Module) -> None:
    """Raise `PlanError` in the first forward pass of `model` if it uses a split parameter outside of its layer."""
    names = WeakIdKeyDictionary()
    for name, each in model.named_parameters():
        split = split_of(each)
        if split is not None and split.degree == DEGREE:
            names[each] = name
    begin = _BeginWatch(names)
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(_EndWatch(begin), always_call=True)

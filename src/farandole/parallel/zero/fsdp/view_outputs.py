"""Outputs of units that are views, as that of `nn.Linear` for three dimensions is: no operation in place on them.

FSDP2 hangs the gathering for backward on a unit's outputs. An operation in place on a view would take its hook off
without a word, and backward would run without parameters; FSDP2 warns of that in every pass. Here its hook gets a
tensor that is no view, and the user a view of it, which autograd does not let anyone change in place. Nothing is
copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def protect_views(unit: nn.Module) -> None:
    """Let views that `unit`, which went through `fully_shard`, returns refuse operations in place."""
    unit.register_forward_hook(_before_hook, prepend=True)
    unit.register_forward_hook(_after_hook)


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory, with the same version counter, as a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0]


class _Guarded(torch.autograd.Function):
    """Its input: a view, for autograd, that is not to be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0]


def _before_hook(unit: nn.Module, arguments: Any, output: Any) -> Any:
    return _changed(output, lambda tensor: tensor._base is not None, _Alias)


def _after_hook(unit: nn.Module, arguments: Any, output: Any) -> Any:
    backward: Any = _Alias
    return _changed(output, lambda tensor: isinstance(tensor.grad_fn, backward._backward_cls), _Guarded)


def _changed(output: Any, is_meant: Any, function: Any) -> Any:
    """Return `output` with `function` on the tensors that are meant; None, so as it is, where there is none."""
    leaves, form = tree_flatten(output)
    meant = [isinstance(each, torch.Tensor) and each.requires_grad and is_meant(each) for each in leaves]
    if not torch.is_grad_enabled() or not any(meant):
        return None
    pairs = zip(leaves, meant, strict=True)
    return tree_unflatten([function.apply(each) if chosen else each for each, chosen in pairs], form)

"""Stage 3 with `precision = "bf16"`: weights of matrix products travel and are whole in 2 bytes an element.

Autocast casts such a weight where it is used, and backward keeps the cast. With parameters gathered in float32
those are a copy of the whole model in 16 bits on every rank, which FSDP2 does not free. So the shard is cast, and
what is gathered is what the product would have cast: the same bits. (FSDP2's `MixedPrecisionPolicy` casts every
parameter of a unit; here norms, biases and all that autocast leaves alone stay in float32.) Backward adds up the
gradients of one pass in 16 bits, as at the cast that autocast keeps, and those of passes and ranks in float32.

[Note: reads beside a product] A layer gives its weight in 16 bits to its own forward pass under autocast. Anyone
else who reads ``layer.weight`` while it is gathered (a router in float32, code with autocast switched off) gets it
in float32: gathered from the shards there and then, by all ranks, with its gradient in float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ....comm.device.streams import untraced
from ...changed_class import ChangedClass, change_class, make_kin
from ...precision.passes import OF_ATTENTION, product_weights
from .exchange_records import unit_calls
from .unit import Unit

_HALF = torch.bfloat16


class _Computing(threading.local):
    depth = 0


_computing = _Computing()
"""How many layers with such weights are computing in this thread, one inside the other."""


class HalfWeights(ChangedClass):
    """The first base of a layer whose weights are gathered in 16 bits. See [Note: reads beside a product]."""

    _farandole_wide: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    """By the name of a weight, what gathers it in float32."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the layer's own forward pass, which may read the weights as they are."""
        if torch.compiler.is_compiling():
            return super().forward(*arguments, **named)
        _computing.depth += 1
        try:
            return super().forward(*arguments, **named)
        finally:
            _computing.depth -= 1


def _weight(name: str) -> property:
    def read(layer: HalfWeights) -> torch.Tensor | None:
        if name not in layer._parameters:
            raise AttributeError(f"{type(layer).__name__!r} object has no attribute {name!r}")
        value = layer._parameters[name]
        if value is None or value.dtype != _HALF or _computes_in_half(value.device.type):
            return value
        wide = layer._farandole_wide.get(name)
        return value if wide is None else wide(value)

    return property(read)


def _computes_in_half(device: str) -> bool:
    """Return whether a product is being computed under autocast; of a graph the latter is known alone."""
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != _HALF:
        return False
    return torch.compiler.is_compiling() or _computing.depth > 0


class HalfProduct(HalfWeights):
    """A linear layer or a convolution."""

    weight = _weight("weight")


class HalfAttention(HalfWeights):
    """torch's attention, which reads the weight of its last layer too."""

    in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight = map(_weight, OF_ATTENTION)


def gather_in_half(model: nn.Module, units: Sequence[Unit]) -> None:
    """Let the blocks of `model` gather in bfloat16 what autocast would cast; what is in no block stays as it is.

    The loop may use the latter between forward and backward, outside of autocast. To be called before anything is
    gathered.
    """
    users = product_weights(model)
    for unit in units:
        if unit.group.modules == (model,):
            continue
        for index, member in enumerate(unit.members):
            for module, name in users.get(member.sharded_param, ()):
                member.param_dtype = _HALF
                unit.halves.add(index)
                if not isinstance(module, HalfWeights):
                    base: Any = HalfAttention if name in OF_ATTENTION else HalfProduct
                    kind: Any = type(module)
                    change_class(module, make_kin(base, kind), 'plan: precision = "bf16"')
                    vars(module)["_farandole_wide"] = {}
                vars(module)["_farandole_wide"][name] = partial(_read_wide, unit, index)


@untraced
def _read_wide(unit: Unit, index: int, half: torch.Tensor) -> torch.Tensor:
    if half is not unit.members[index]._unsharded_param:
        return half  # another tensor stands for it, as with torch.func.functional_call
    wide = _FullRead.apply(half, unit, index) if torch.is_grad_enabled() else _gather_wide(unit, index)
    if unit.watches_reads and not wide.is_inference():
        unit.copies.append((index, wide, wide._version))
    return wide


@torch.no_grad()
def _gather_wide(unit: Unit, index: int) -> torch.Tensor:
    member = unit.members[index]
    with unit_calls(unit.shards, f"for a read of {member._param_fqn!r}"):
        whole: torch.Tensor = member.sharded_param.full_tensor()
    return whole


class _FullRead(torch.autograd.Function):
    """A parameter in float32, whose gradient does not become one of the 16-bit parameter."""

    @staticmethod
    def forward(context: Any, half: torch.Tensor, unit: Unit, index: int) -> torch.Tensor:
        context.unit, context.index = unit, index
        return _gather_wide(unit, index)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        reads, index = context.unit.reads, context.index
        reads[index] = gradient.clone() if index not in reads else reads[index].add_(gradient)
        return None, None, None

"""Whole parameters that a divided region uses: found in the graph, and summed where they enter the region.

[Note: partial gradients] Norms of heads, and with `sequence_parallel` all that a block does outside of its divided
layers, are whole on every rank, and work on this rank's heads or tokens: each rank has a part of their gradient,
and the gradient is the sum. Which parameters these are does not depend on values, which may be zero (a branch that
begins at zero, a frozen norm): autograd's graph tells it. From the outputs, whose gradients all ranks have whole,
each function of ours says whether it hands on the whole gradient or a part of it (``gives``), and any other
function hands on what it gets. What reaches a parameter in part is summed by an identity through which the
parameter enters the unit, as activations do (Shoeybi et al. 2019, section 3, f). What the loss adds to a parameter
by itself goes past it: each rank has that whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn

from ...core.vocabulary.errors import Mismatch, PlanError
from .clone import OwnHook
from .regions import TensorRanks, first_order

_SAME = "same"
_BYTES_OF_16_BITS = 2
_MARKS = 2**16
"""Sums of fewer numbers than this are exact in float32 over 256 ranks."""
_ENTERED = "_farandole_entered"


def kinds_of_gradients(outputs: Sequence[tuple[torch.Tensor, str]]) -> list[tuple[torch.Tensor, frozenset[str]]]:
    """Return the leaves that `outputs` are made of, and how gradients reach them: see [Note: partial gradients].

    Each output comes with the kind of its own gradient, "whole" or "part".
    """
    kinds: dict[Any, set[str]] = {}
    for each, kind in outputs:
        if each.grad_fn is not None:
            kinds.setdefault(each.grad_fn, set()).add(kind)
    leaves = []
    for node in _from_outputs(list(kinds)):
        reached = kinds.setdefault(node, set())
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            leaves.append((leaf, frozenset(reached)))
        gives = getattr(getattr(type(node), "_forward_cls", None), "gives", ())
        for at, (below, _) in enumerate(node.next_functions):
            if below is not None:
                kind = gives[at] if at < len(gives) else _SAME
                kinds.setdefault(below, set()).update(reached if kind == _SAME else {kind})
    return leaves


def _from_outputs(roots: list[Any]) -> list[Any]:
    """Return the nodes below `roots`, each after all that it gets gradients from."""
    order, seen = [], set(roots)
    stack = [(root, iter(root.next_functions)) for root in roots]
    while stack:
        node, rest = stack[-1]
        for below, _ in rest:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append((below, iter(below.next_functions)))
                break
        else:
            order.append(node)
            stack.pop()
    return order[::-1]


class _Enter(torch.autograd.Function):
    """Forward: the same parameters; backward: the sums of the ranks' gradients, which travel together."""

    @staticmethod
    def forward(ctx: Any, ranks: TensorRanks, what: str, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.what = ranks, what
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in parameters)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_sums(grads, ctx.ranks, ctx.what)


def _sums(grads: Sequence[torch.Tensor | None], ranks: TensorRanks, what: str) -> list[torch.Tensor | None]:
    given = [each for each in grads if each is not None]
    if not given:
        return list(grads)
    flat = torch.cat([each.reshape(-1) for each in given])
    if flat.element_size() == _BYTES_OF_16_BITS:
        flat = flat.float()
    # Which parameters these are travels with them: ranks whose graphs differ would add up gradients of two.
    mark = crc32(f"{what} {[each is not None for each in grads]}".encode()) % _MARKS
    summed = ranks.all_reduce(torch.cat([flat, flat.new_tensor([mark])]), what)
    # On an accelerator, looking at a number would wait for the device.
    if flat.device.type == "cpu" and summed[-1] != ranks.size * mark:
        raise Mismatch(
            f"the ranks of a tensor group sum gradients of different parameters, here of {what}",
            rank=ranks.part.job_rank,
            operation="sum of partial gradients",
            remedy="let all of them run the same modules: which ones may not depend on a rank's own tokens",
        )
    sums = iter(summed[:-1].split([each.numel() for each in given]))
    return [None if each is None else next(sums).view(each.shape).to(each.dtype) for each in grads]


class _Unproven(torch.autograd.Function):
    """Forward: the same parameter; backward: a refusal, because nothing is known of its gradient."""

    @staticmethod
    def forward(ctx: Any, what: str, parameter: torch.Tensor) -> torch.Tensor:
        ctx.what = what
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise PlanError(
            f"tensor: {ctx.what!r} has a gradient, but was not used when its unit was proven: whether the ranks' "
            "gradients are parts is not known",
            remedy="use it in the first forward pass too (times zero), or leave the layers around it whole by "
            "tensor_recipe",
        )


@dataclass(frozen=True)
class Entrants:
    """The whole parameters of one kind of units, by their names in the unit, that do not enter as they are."""

    summed: tuple[str, ...] = ()
    """Each rank has a part of their gradient."""
    unproven: tuple[str, ...] = ()
    """No gradient reached them in the proof."""


_Replaced = tuple[nn.Module, str, torch.Tensor, torch.Tensor]
"""A module and the name of its parameter, which is the third, and what is there instead of it."""


class Entrance(OwnHook):
    """Hooks of one unit: while its forward pass runs, its modules have what the parameters became by entering."""

    def __init__(self, ranks: TensorRanks, name: str) -> None:
        self.ranks, self.name = ranks, name
        self.entrants = Entrants()
        self._replaced: list[list[_Replaced]] = []

    def install(self, unit: nn.Module) -> None:
        """Let the parameters of `unit` enter from now on."""
        unit.register_forward_pre_hook(self.before)
        unit.register_forward_hook(self.after, always_call=True)

    def before(self, unit: nn.Module, args: Any) -> None:
        """See `torch.nn.Module.register_forward_pre_hook`."""
        replaced: list[_Replaced] = []
        self._replaced.append(replaced)
        if not torch.is_grad_enabled():
            return
        by_module: dict[str, list[str]] = {}
        for path in self.entrants.summed:
            home, _, key = path.rpartition(".")
            by_module.setdefault(home, []).append(key)
        for home, keys in by_module.items():
            module = unit.get_submodule(home)
            here = [key for key in keys if _enters(module._parameters[key])]
            if here:
                what = f"{self._full(home)}: {', '.join(here)}"
                entered = _Enter.apply(self.ranks, what, *(module._parameters[key] for key in here))
                replaced += _replace(module, here, entered)
        for path in self.entrants.unproven:
            home, _, key = path.rpartition(".")
            module = unit.get_submodule(home)
            if _enters(module._parameters[key]):
                entered = _Unproven.apply(self._full(path), module._parameters[key])
                replaced += _replace(module, [key], [entered])

    def after(self, unit: nn.Module, args: Any, output: Any) -> None:
        """See `torch.nn.Module.register_forward_hook`."""
        for module, key, parameter, entered in self._replaced.pop() if self._replaced else ():
            if module._parameters.get(key) is entered:
                module._parameters[key] = parameter  # type: ignore[assignment]

    def _full(self, path: str) -> str:
        return ".".join(each for each in (self.name, path) if each)


def _enters(parameter: torch.Tensor | None) -> bool:
    """Return whether a parameter still has to enter: a unit around this one may have let it in."""
    return parameter is not None and parameter.requires_grad and not hasattr(parameter, _ENTERED)


def _replace(module: nn.Module, keys: Sequence[str], entered: Sequence[torch.Tensor]) -> list[_Replaced]:
    replaced: list[_Replaced] = []
    for key, tensor in zip(keys, entered, strict=True):
        parameter = module._parameters[key]
        assert parameter is not None, f"{key} is gone"
        vars(tensor)[_ENTERED] = True
        module._parameters[key] = tensor  # type: ignore[assignment]
        replaced.append((module, key, parameter, tensor))
    return replaced

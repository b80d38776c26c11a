"""A forward pass divided into spans: calls of a model's parts, and its own code between them.

Parts are what a pipeline calls whole: repeated blocks, and children of the modules around them. Everything that is
observed of a pass is written into the span during which it happened; operations of a backward pass belong to the
span in which autograd made their node, which its sequence number says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...parallel.blocks import repeated_blocks
from ...parallel.pipeline.trace import traced_through


@dataclass
class Attention:
    """Calls of `scaled_dot_product_attention` in a span, those inside of `nn.MultiheadAttention` too."""

    heads: int = 0
    """Heads of queries; with several calls what all are a multiple of."""
    key_value_heads: int = 0
    query_bytes: float = 0.0
    key_value_bytes: float = 0.0
    sequence: int = 0
    saved_bytes: float = 0.0
    has_dropout: bool = False
    flops: float = 0.0
    """What attention in one kernel computes."""
    backward_flops: float = 0.0
    undivided: str = ""
    """What context parallel refuses; with it the sequences of the model cannot be divided."""


@dataclass
class Divided:
    """What the recipe for tensor parallel would divide in a span."""

    flops: float = 0.0
    saved_bytes: float = 0.0
    sum_bytes: float = 0.0
    forward_sums: int = 0
    backward_sums: int = 0


@dataclass
class Experts:
    """What the experts in a span do."""

    flops: float = 0.0
    token_bytes: float = 0.0


@dataclass
class PassSpan:
    """What was seen during one call of a part, or between calls. Bytes of numbers are those they have in fp32."""

    name: str
    """Name of the module; empty: code between modules."""
    module: nn.Module | None
    inputs: tuple[Any, ...] = ()
    """Shapes and types of the tensors it was called with."""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    uncast_flops: float = 0.0
    operations: int = 0
    products: int = 0
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    divided: Divided = field(default_factory=Divided)
    experts: Experts = field(default_factory=Experts)
    attention: Attention = field(default_factory=Attention)


class PassSpans:
    """The spans of one forward pass of `model`, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.all: list[PassSpan] = []
        self.parts = dict(parts_of(model))
        self.blocks = {name for name, _ in repeated_blocks(model)}
        self._begins: list[int] = []
        self._depth = 0

    @property
    def current(self) -> PassSpan:
        """The span that is open."""
        return self.all[-1]

    def of_node(self, number: int) -> PassSpan:
        """Return the span in which autograd made the node with this sequence number."""
        return self.all[max(0, bisect_right(self._begins, number) - 1)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Fill `all` by the forward pass inside."""
        handles = []
        for name, module in self.parts.items():
            handles += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        self._open(PassSpan("", None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _open(self, span: PassSpan) -> None:
        self.all.append(span)
        self._begins.append(torch.autograd._get_sequence_nr())

    def _enter(self, name: str, module: nn.Module, arguments: Any, named: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._open(PassSpan(name, module, inputs=_shapes(arguments, named)))

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.current.output_bytes = sum(map(fp32_bytes, leaves))
            self._open(PassSpan("", None))


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a pipeline calls whole, with their names."""
    opened = traced_through(model)

    def inside(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if child in seen:
                continue
            seen.add(child)
            if child in opened or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                yield from inside(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child

    seen: set[nn.Module] = set()
    yield from inside(model, "")


def fp32_bytes(tensor: torch.Tensor) -> float:
    """Return the bytes of the elements of `tensor`, in fp32 if they are floating-point."""
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())


def _shapes(arguments: Any, named: Any) -> tuple[Any, ...]:
    leaves = tree_leaves((arguments, named))
    return tuple((tuple(each.shape), each.dtype) for each in leaves if isinstance(each, torch.Tensor))

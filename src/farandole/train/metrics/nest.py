"""A nest of containers taken apart into its leaves, and put together again from others.

Dicts and tuples are structure. Tensors, NumPy arrays and lists are rows; everything else is one value of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["tensor", "array", "list", "value"]


@dataclass(frozen=True)
class Leaf:
    """What is gathered by itself."""

    path: str
    """Where it stands, as ``['boxes'][0]``; empty: the value is the leaf."""
    kind: Kind
    value: Any
    """A tensor without gradient for the kinds "tensor" and "array", else the object."""

    @property
    def rows(self) -> int | None:
        """How many rows it has; None: a single value."""
        if self.kind == "list":
            return len(self.value)
        if self.kind == "value" or not self.value.dim():
            return None
        return int(self.value.shape[0])

    @property
    def form(self) -> str:
        """What must be the same on all ranks."""
        if self.kind in ("list", "value"):
            return f"a {'list' if self.kind == 'list' else 'single value'}"
        shape = ", ".join(["*", *map(str, self.value.shape[1:])][: self.value.dim()])
        return f"a {self.kind} of {str(self.value.dtype).removeprefix('torch.')} and shape [{shape}]"


def take_apart(value: Any) -> tuple[list[Leaf], Callable[[list[Any]], Any]]:
    """Return the leaves of a nest, and what makes the same nest of as many other values."""
    leaves: list[Leaf] = []
    build = _walk(value, "", leaves)
    return leaves, lambda values: build(iter(values))


def _walk(value: Any, path: str, leaves: list[Leaf]) -> Callable[[Any], Any]:
    if isinstance(value, Mapping):
        names = sorted(value, key=repr)  # ranks may have put them in in another order
        parts = {name: _walk(value[name], f"{path}[{name!r}]", leaves) for name in names}

        def mapping(values: Any) -> Any:
            made = {name: parts[name](values) for name in names}
            return {name: made[name] for name in value}

        return mapping
    if isinstance(value, tuple):
        items = [_walk(item, f"{path}[{i}]", leaves) for i, item in enumerate(value)]
        kind = type(value)
        if hasattr(kind, "_fields"):
            return lambda values: kind(*(item(values) for item in items))
        return lambda values: tuple(item(values) for item in items)
    leaves.append(_leaf(path, value))
    return next


def tensors_with_gradients(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a nest as they are, by the paths of their leaves."""
    if isinstance(value, Mapping):
        parts = [tensors_with_gradients(value[name], f"{path}[{name!r}]") for name in value]
    elif isinstance(value, tuple):
        parts = [tensors_with_gradients(item, f"{path}[{i}]") for i, item in enumerate(value)]
    else:
        return {path: value} if isinstance(value, torch.Tensor) else {}
    return {name: tensor for part in parts for name, tensor in part.items()}


def _leaf(path: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        return Leaf(path, "tensor", value.detach())
    if isinstance(value, list):
        return Leaf(path, "list", value)
    array = _as_tensor(value)
    return Leaf(path, "value", value) if array is None else Leaf(path, "array", array)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a NumPy array of numbers as a tensor."""
    if (
        type(value).__module__ != "numpy"
        or not hasattr(value, "__array_interface__")
        or not hasattr(value, "resize")
    ):
        return None  # NumPy is not imported for this; its scalars are values
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # of texts or objects
        return None

"""The tensors in a batch or in a model's output: nests of containers, dataclasses and plain objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

_MOST_TENSORS = 64
_DEPTH = 4
"""Containers within containers."""


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers and plain objects, the first `_MOST_TENSORS` of them."""
    yield from islice(_walk(value, depth), _MOST_TENSORS)


def _walk(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module, type)):
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _walk(part, depth - 1)

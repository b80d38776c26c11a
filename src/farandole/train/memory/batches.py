"""Batches of any number of samples, from the function that a user gives."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean
from .user_code import errors_of_user

# Batches as shapes on a command line: ``8,128:int64``.

_TYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def zeros_of(texts: Sequence[str], samples: int | None = None) -> tuple[torch.Tensor, ...]:
    """Return a tensor of zeros for each text; `samples` replaces the first number of each shape."""
    shapes = [read_shape(text) for text in texts]
    return tuple(
        torch.zeros(shape if samples is None else [samples, *shape[1:]], dtype=dtype) for shape, dtype in shapes
    )


def read_shape(text: str) -> tuple[list[int], torch.dtype]:
    """Read one shape with its type, float32 by default. Raises `ConfigError`."""
    shape, colon, kind = text.partition(":")
    sizes = [each.strip() for each in shape.split(",")]
    if not all(each.isdecimal() and int(each) > 0 for each in sizes):
        raise ConfigError(f"--input {text!r}: expected a shape and a type such as 8,128:int64")
    if colon and kind not in _TYPES:
        raise ConfigError(f"--input {text!r}: type {kind!r} is not known", remedy=did_you_mean(kind, _TYPES))
    return [int(each) for each in sizes], _TYPES[kind] if colon else torch.float32


SAMPLES = 2
"""Samples of the example batch, where the function takes a number."""


class Batches:
    """Makes batches: the function takes the number of samples, or nothing and returns an example."""

    def __init__(self, make_batch: Callable[..., Any]) -> None:
        self._make = make_batch
        self.takes_samples = _takes_a_number(make_batch)

    def example(self, samples: int = SAMPLES) -> tuple[Any, int]:
        """Return a batch and its number of samples: `samples`, or what a function without arguments gives."""
        batch = self.made(samples)
        return batch, samples_of(batch)

    def made(self, samples: int = SAMPLES) -> Any:
        """Return what the function returns, which may be no tensors that count samples."""
        with errors_of_user("making the batch"):
            return self._make(samples) if self.takes_samples else self._make()

    def of(self, samples: int) -> Any:
        """Return a batch of `samples`: the example's samples again and again if the function takes no number."""
        if self.takes_samples:
            batch, found = self.example(samples)
            if found != samples:
                raise ConfigError(
                    f"the function for the batch was asked for {samples} samples and returned {found}",
                    remedy="make its tensors' first dimension the number that it gets",
                )
            return batch
        batch, found = self.example()
        return batch if found == samples else resized(batch, found, samples)


def samples_of(batch: Any) -> int:
    """Return the first dimension that most tensors of `batch` have. Raises `ConfigError` without one."""
    sizes = Counter(each.shape[0] for each in tree_leaves(batch) if isinstance(each, torch.Tensor) and each.dim())
    if not sizes:
        raise ConfigError(
            f"the function for the batch returned {type(batch).__name__} without a tensor that has samples",
            remedy="return a tensor, a sequence of the model's positional arguments, or a mapping of named ones",
        )
    samples = int(sizes.most_common(1)[0][0])
    if samples < 1:
        raise ConfigError(
            "the function for the batch returned an empty batch", remedy="return at least one sample"
        )
    return samples


def resized(batch: Any, before: int, samples: int) -> Any:
    """Return `batch` with `samples` instead of `before`, in every tensor whose first dimension these are.

    What is there twice, such as ids that are labels too, is one tensor again.
    """
    made: dict[int, torch.Tensor] = {}

    def resize(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.dim() or each.shape[0] != before:
            return each
        times = -(-samples // before)
        if id(each) not in made:
            made[id(each)] = (torch.cat([each] * times) if times > 1 else each)[:samples].clone()
        return made[id(each)]

    return tree_map(resize, batch)


def batch_bytes(batch: Any) -> int:
    """Return the bytes of the tensors of `batch`, each once."""
    found = {id(each): each.nbytes for each in tree_leaves(batch) if isinstance(each, torch.Tensor)}
    return sum(found.values())


def as_inputs(batch: Any) -> Any:
    """Return `batch` as `farandole.step` takes inputs: a tensor, a tuple or a dict."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return batch if isinstance(batch, torch.Tensor) else tuple(batch)


def _takes_a_number(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in kinds and each.default is each.empty for each in signature.parameters.values())

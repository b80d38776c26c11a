"""Batches as shapes on a command line: ``8,128:int64``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.suggestions import did_you_mean

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

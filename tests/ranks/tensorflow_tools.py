"""What the checks of `tensorflow_script` and `tensorflow_strange` have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf

import farandole.horovod.tensorflow as hvd

HAS_KERNEL = os.environ.get("FARANDOLE_NATIVE") != "0"
"""Whether operations in graphs are the kernel in C++, and not Python functions."""
DISAGREE: Any = (tf.errors.FailedPreconditionError,)
if not HAS_KERNEL:
    DISAGREE += (tf.errors.UnknownError,)  # what a Python function inside a graph can say
F = TypeVar("F", bound=Callable[..., Any])


def mine(shape: Any, dtype: str = "float32", rank: int | None = None) -> Any:
    """Return what a rank has: small numbers that all types hold."""
    rank = hvd.rank() if rank is None else rank
    count = 1
    for length in shape:
        count *= length
    return tf.cast(tf.reshape((tf.range(count) * (rank + 1) + rank) % 7, shape), dtype)


def everybody(shape: Any, dtype: str = "float32") -> list[Any]:
    return [mine(shape, dtype, rank) for rank in range(hvd.size())]


def same(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert bool(tf.reduce_all(found == expected)), (found, expected)


def graph(function: F, **options: Any) -> F:
    """Return a function that is made a graph."""
    return cast(F, tf.function(function, **options))


def both(function: Callable[..., Any], *tensors: Any) -> list[Any]:
    """Return what a function gives outside a graph and inside one, run twice."""
    traced = graph(function)
    return [function(*tensors), traced(*tensors), traced(*tensors)]


def raises(kind: Any, text: str, function: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        function()

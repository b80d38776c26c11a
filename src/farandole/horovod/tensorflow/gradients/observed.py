"""Gradients of TensorFlow, told to ``farandole verify``: at once, or when the graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...verify.arrays import Array
from ...verify.observed import Observed
from ..installed import tf


def tell(observed: Observed, places: Sequence[int], own: Sequence[Any], results: Sequence[Any]) -> None:
    """Tell of an exchange that was made, or put into the graph that is being made.

    Args:
        observed: who is told.
        places: the gradients that were exchanged.
        own: their gradients of this rank.
        results: those of all ranks.
    """
    count = len(places)

    def note(*arrays: Array) -> np.bool_:
        observed.tell(places, arrays[:count], arrays[count:])
        return np.bool_(True)

    tensors = [tf.convert_to_tensor(each) for each in (*own, *results)]
    if tf.executing_eagerly():
        note(*[tensor.numpy() for tensor in tensors])
    else:
        tf.numpy_function(note, tensors, tf.bool)


def read(variable: Any) -> Array:
    """Return the value of a variable."""
    return np.asarray(tf.convert_to_tensor(variable).numpy())

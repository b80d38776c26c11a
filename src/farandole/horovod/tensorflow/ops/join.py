"""Join: a rank that is out of data lets the others go on."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....core.vocabulary.errors import CommError, ConfigError
from ...common.basics import basics
from ...common.exceptions import from_comm_error
from ...common.operations import operation_names
from ..installed import tf
from .inputs import not_converted


@not_converted
def join() -> Any:
    """Mark this rank as out of data, and wait until all ranks have joined.

    Until then this rank contributes zeros to the allreduces of the others, whose Average still divides by the
    number of all ranks.

    Returns:
        The rank that joined last, an int32 scalar, the same on all ranks.
    """
    if tf.executing_eagerly():
        return tf.constant(_join(), tf.int32)
    last = tf.numpy_function(lambda: np.int32(_join()), [], tf.int32, name="HorovodJoin")
    last.set_shape([])
    return last


def _join() -> int:
    try:
        last: int = basics.running.engine.join().wait()
    except ConfigError as problem:
        raise ValueError(str(problem)) from problem
    except CommError as problem:
        raise from_comm_error(problem) from problem
    operation_names.all_joined()
    return last

"""Rank and size as tensors: graphs read them when they run, not when they are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...common.basics import basics
from ...common.process_sets import UNKNOWN, ProcessSet
from ..installed import tf


def rank_op(name: str | None = None) -> Any:
    """Return this rank, an int32 scalar."""
    return _scalar(basics.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return this rank among those of its host, an int32 scalar."""
    return _scalar(basics.local_rank, name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks of this host, an int32 scalar."""
    return _scalar(basics.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set, an int32 scalar. The graph fails where there is none."""
    return _scalar(lambda: len(_ranks(process_set_id)), name)


def set_rank_op(process_set: ProcessSet) -> Any:
    """Return this rank's place in a process set, an int32 scalar."""
    return _scalar(lambda: process_set.rank() or 0, None)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 where this rank is a member of a process set, else 0, an int32 scalar.

    Negative where there is no answer: -1 before `init`, -2 for a set that does not exist.
    """

    def included() -> int:
        if not basics.is_initialized():
            return -1
        sets = basics.running.engine.process_sets
        return -2 if process_set_id not in sets else int(basics.rank() in sets[process_set_id])

    return _scalar(included, name)


def _ranks(process_set_id: int) -> tuple[int, ...]:
    sets = basics.running.engine.process_sets
    if process_set_id not in sets:
        raise ValueError(UNKNOWN)
    return sets[process_set_id]


def _scalar(ask: Callable[[], int], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(ask(), tf.int32)
    found = tf.numpy_function(lambda: np.int32(ask()), [], tf.int32, name=name)
    found.set_shape([])
    return found


# The number of the world, as a tensor: graphs read it when they run.
#
# It counts shutdowns. An operation in a graph takes it as an input, so nothing that goes into an operation is
# constant (see `exchange.cc`), and one that began in a world that is over is refused in the next.


class WorldNumber:
    """The number of this process's world."""

    def __init__(self) -> None:
        self.number = 0
        self._variable: Any = None

    def tensor(self) -> Any:
        """Return the number as a tensor of the graph that is being made."""
        if tf.executing_eagerly():
            return tf.constant(self.number, tf.int64)
        with tf.init_scope(), tf.device("CPU:0"):
            if self._variable is None:
                self._variable = tf.Variable(
                    self.number, trainable=False, dtype=tf.int64, name="farandole_generation"
                )
        return self._variable.read_value()

    def next(self) -> None:
        """The world is over."""
        self.number += 1
        if self._variable is not None:
            with tf.init_scope():
                self._variable.assign(self.number)


generation = WorldNumber()
"""That of this process."""
basics.call_on_shutdown(generation.next)

"""The number of the world, as a tensor: graphs read it when they run.

It counts shutdowns. An operation in a graph takes it as an input, so nothing that goes into an operation is
constant (see `exchange.cc`), and one that began in a world that is over is refused in the next.
"""

from __future__ import annotations

from typing import Any

from ...common.basics import basics
from ..installed import tf


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

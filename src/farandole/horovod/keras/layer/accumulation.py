"""Gradients of several backward passes, added up on each rank before they travel.

The sums are variables of their own, which are no variables of the optimizer: a saved file has none of them.

[Note: loss scales] An optimizer that scales the loss looks whether *its own* gradients are finite, and applies the
one inside it only then. Were the exchange in there, a rank with an infinity would skip what the others wait in. So
ours is outside: the infinity reaches all ranks, and all skip.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from ...exchange.names import key_of
from .backends import backend_name

# Whether a distributed optimizer is inside one that scales the loss.

_WRAPPED_INSIDE = (
    "DistributedOptimizer inside a LossScaleOptimizer: a rank whose gradients are not finite would skip the "
    "exchange that the other ranks wait in. Wrap from outside: "
    "hvd.DistributedOptimizer({module}.LossScaleOptimizer(optimizer))"
)


def scales_loss(optimizer: Any) -> bool:
    """Return whether an optimizer of either Keras is one that scales the loss."""
    return any(each.__name__.startswith("LossScaleOptimizer") for each in type(optimizer).__mro__)


def refuse_loss_scale_around(optimizer: Any) -> None:
    """Raise where a LossScaleOptimizer calls a distributed one inside it, which calls this. See the note above."""
    frame = sys._getframe(2)
    for _ in range(3):  # a wrapper or two may lie between
        caller = frame.f_locals.get("self")
        if caller is not None and caller is not optimizer and scales_loss(caller):
            legacy = type(caller).__module__.startswith("tf_keras")
            module = "tf_keras.mixed_precision" if legacy else "keras.optimizers"
            raise ValueError(_WRAPPED_INSIDE.format(module=module))
        if frame.f_back is None:
            return
        frame = frame.f_back


_SPARSE = "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."


class PassTools(Protocol):
    """What the sums need of one Keras."""

    def variable(self, shape: Any, dtype: Any, name: str) -> Any:
        """Return a new variable of zeros, outside the graph that is being made."""

    def assign_zeros(self, variable: Any) -> None:
        """Overwrite a variable."""

    def choose(self, is_last: Any, last: Callable[[], None], more: Callable[[], None]) -> None:
        """Call one of both, in a graph too."""


class _Keras3:
    def variable(self, shape: Any, dtype: Any, name: str) -> Any:
        import keras

        with _outside_graphs():
            return keras.Variable(initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=name)

    def assign_zeros(self, variable: Any) -> None:
        import keras

        variable.assign(keras.ops.zeros_like(variable))

    def choose(self, is_last: Any, last: Callable[[], None], more: Callable[[], None]) -> None:
        import keras

        keras.ops.cond(is_last, last, more)


class _Legacy:
    def variable(self, shape: Any, dtype: Any, name: str) -> Any:
        from ...tensorflow.installed import tf

        with tf.init_scope():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

    def assign_zeros(self, variable: Any) -> None:
        from ...tensorflow.installed import tf

        variable.assign(tf.zeros_like(variable))

    def choose(self, is_last: Any, last: Callable[[], None], more: Callable[[], None]) -> None:
        from ...tensorflow.installed import tf

        tf.cond(is_last, last, more)


KERAS_3: PassTools = _Keras3()
LEGACY: PassTools = _Legacy()
"""These are for tf_keras."""


class PassAccumulator:
    """The sums of one optimizer."""

    def __init__(self, passes: int, *, averages: bool, sparse_as_dense: bool, tools: PassTools = KERAS_3) -> None:
        self.passes = passes
        self.counter: Any = None
        """A variable: passes since the last exchange."""
        self._averages = averages
        self._sparse_as_dense = sparse_as_dense
        self._tools = tools
        self._sums: dict[int, Any] = {}
        self._places: dict[int, int] = {}

    def build(self, variables: Sequence[Any]) -> None:
        """Make a sum for each variable."""
        self.counter = self._tools.variable((), "int32", "passes")
        for place, variable in enumerate(variables):
            self._places[key_of(variable)] = place
            self._sums[place] = self._tools.variable(variable.shape, variable.dtype, "sum")

    def build_once(self, variables: Sequence[Any]) -> None:
        """Make what is missing."""
        if self.counter is None:
            self.build(variables)

    def places(self, variables: Sequence[Any]) -> list[int]:
        """Return the places of variables, as they were given to `build`; raise ValueError for others."""
        for variable in variables:
            if key_of(variable) not in self._places:
                raise ValueError(
                    f"backward_passes_per_step: {getattr(variable, 'name', variable)} was not in the first pass: "
                    "apply gradients of all variables together"
                )
        return [self._places[key_of(variable)] for variable in variables]

    def add(
        self,
        gradients: Sequence[Any],
        places: Sequence[int],
        step: Callable[[list[Any]], None],
        wait: Callable[[], None],
    ) -> None:
        """Add the gradients of one pass: the last one calls `step` with the sums, the others call `wait`.

        `places`: of the variables whose gradients these are, as they were given to `build`.
        """
        sums = [None if each is None else self._sums[place] + dense(each, sparse_as_dense=self._sparse_as_dense)
                for each, place in zip(gradients, places, strict=True)]  # fmt: skip
        pairs = [(self._sums[place], each) for place, each in zip(places, sums, strict=True) if each is not None]

        def last() -> None:
            step([each / self.passes if each is not None and self._averages else each for each in sums])
            for kept, _ in pairs:
                self._tools.assign_zeros(kept)  # whatever was in it: an infinity must not stay

        def more() -> None:
            for kept, total in pairs:
                kept.assign(total)
            wait()

        self._tools.choose(self.counter + 1 >= self.passes, last, more)
        self.counter.assign((self.counter + 1) % self.passes)


def dense(gradient: Any, *, sparse_as_dense: bool) -> Any:
    """Return a gradient as a tensor; raise ValueError for IndexedSlices unless `sparse_as_dense`."""
    if hasattr(gradient, "indices") and hasattr(gradient, "values") and hasattr(gradient, "dense_shape"):
        if not sparse_as_dense:
            raise ValueError(_SPARSE)
        from ...tensorflow.installed import tf

        return tf.convert_to_tensor(gradient)
    return gradient


def _outside_graphs() -> AbstractContextManager[Any]:
    """Return a context in which variables are made once, not by each run of a graph."""
    if backend_name() != "tensorflow":
        return nullcontext()
    from ...tensorflow.installed import tf

    scope: AbstractContextManager[Any] = tf.init_scope()
    return scope

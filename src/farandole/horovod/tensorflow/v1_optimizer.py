"""An optimizer of `tf.compat.v1.train` whose gradients are those of all ranks, in sessions and outside graphs.

Gradients meet where they are computed, as in Horovod; scripts clip them before they apply them. Those that were
computed elsewhere, by `tf.gradients`, meet where they are applied.

[Note: passes of a session] With several backward passes the gradients of each run are added to sums, and only the
last run of a step exchanges and applies them. The sums are local variables, as in Horovod:
``tf.compat.v1.local_variables_initializer()`` makes them, which `MonitoredTrainingSession` runs by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..exchange.names import key_of
from ..exchange.settings import GradientSettings
from ..keras.layer.accumulation import dense
from .gradients.exchange import FlatExchange
from .installed import tf

Pairs = list[tuple[Any, Any]]


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Wraps an optimizer."""

    def __init__(self, optimizer: Any, settings: GradientSettings, name: str, use_locking: bool = False) -> None:
        """`name`: the same on all ranks; the others: as in `DistributedOptimizer`.

        Raises:
            ValueError: several backward passes outside graphs.
        """
        if settings.passes > 1 and tf.executing_eagerly():
            raise ValueError(
                "backward_passes_per_step > 1 is not yet supported for _LegacyOptimizer with eager execution."
            )
        super().__init__(use_locking=use_locking, name=f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._settings = settings
        self._exchange = FlatExchange(settings, name)
        self._computed: frozenset[int] = frozenset()
        """The variables whose gradients of all ranks were computed, and not applied yet."""
        self._is_last: Any = None
        """Whether this run is the last of a step, as a tensor; None without several passes."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return pairs of gradient and variable: the gradients of all ranks. Arguments: as the optimizer's own."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        self._computed = frozenset(key_of(variable) for _, variable in pairs)
        return self._meet(pairs)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the operation that updates the variables. Arguments: as the optimizer's own."""
        pairs = list(grads_and_vars)
        if {key_of(variable) for _, variable in pairs} <= self._computed:
            self._computed = frozenset()
        else:
            pairs = self._meet(pairs)
        if self._is_last is None or not pairs:
            return self._optimizer.apply_gradients(pairs, *args, **kwargs)

        def apply() -> Any:
            with tf.control_dependencies([self._optimizer.apply_gradients(pairs, *args, **kwargs)]):
                return tf.constant(True)

        return tf.cond(self._is_last, apply, lambda: tf.constant(False)).op

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of `var` on this rank: it is not exchanged."""
        self._exchange.local.add(key_of(var))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the optimizer's slots."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer's variables."""
        return self._optimizer.variables(*args, **kwargs)

    def _meet(self, pairs: Pairs) -> Pairs:
        if not pairs:
            return pairs
        gradients, variables = zip(*pairs, strict=True)
        meet = self._exchange if self._settings.passes == 1 else self._add_pass
        return list(zip(meet(gradients, variables), variables, strict=True))

    def _add_pass(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add the gradients of one run: the last one of a step returns all ranks', the others their own."""
        settings = self._settings
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        own = [dense(gradients[place], sparse_as_dense=settings.sparse_as_dense) for place in places]
        sums = [_local_variable(variables[place].shape, gradient.dtype, "sum")
                for place, gradient in zip(places, own, strict=True)]  # fmt: skip
        passes = _local_variable((), tf.int32, "passes")
        totals = [kept + gradient for kept, gradient in zip(sums, own, strict=True)]
        with tf.control_dependencies(totals):
            done = passes.read_value() + 1
        self._is_last = is_last = done >= settings.passes

        def last() -> list[Any]:
            asked: list[Any] = [None] * len(gradients)
            for place, total in zip(places, totals, strict=True):
                asked[place] = total / settings.passes if settings.averages_passes else total
            found = self._exchange(asked, variables)
            return [tf.identity(found[place]) for place in places]

        results = tf.cond(is_last, last, lambda: [tf.identity(each) for each in own])
        with tf.control_dependencies(list(results)):  # the sums are read before
            kept = [each.assign(tf.where(is_last, tf.zeros_like(total), total), read_value=False)
                    for each, total in zip(sums, totals, strict=True)]  # fmt: skip
            kept.append(passes.assign(done % settings.passes, read_value=False))
        returned: list[Any] = list(gradients)
        with tf.control_dependencies(kept):  # a run that takes any result adds its pass
            for place, result in zip(places, results, strict=True):
                returned[place] = tf.identity(result)
        return returned


def _local_variable(shape: Any, dtype: Any, name: str) -> Any:
    """Return a variable of zeros that no saver takes. See [Note: passes of a session]."""
    v1 = tf.compat.v1
    return v1.Variable(
        tf.zeros(shape, dtype), trainable=False, name=name, use_resource=True,
        collections=[v1.GraphKeys.LOCAL_VARIABLES],
    )  # fmt: skip

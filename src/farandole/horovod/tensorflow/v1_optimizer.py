"""An optimizer of `tf.compat.v1.train` whose gradients are those of all ranks, in sessions and outside graphs.

Gradients meet where they are computed, as in Horovod; scripts clip them before they apply them. Those that were
computed elsewhere, by `tf.gradients`, meet where they are applied.
"""

from __future__ import annotations

from typing import Any

from ..exchange.names import key_of
from ..exchange.settings import GradientSettings
from .gradients.exchange import FlatExchange
from .installed import tf

Pairs = list[tuple[Any, Any]]


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Wraps an optimizer."""

    def __init__(self, optimizer: Any, settings: GradientSettings, name: str, use_locking: bool = False) -> None:
        """`name`: the same on all ranks; the others: as in `DistributedOptimizer`.

        Raises:
            ValueError: several backward passes outside graphs.
            NotImplementedError: several backward passes.
        """
        if settings.passes > 1 and tf.executing_eagerly():
            raise ValueError(
                "backward_passes_per_step > 1 is not yet supported for _LegacyOptimizer with eager execution."
            )
        if settings.passes > 1:
            raise NotImplementedError(
                f"DistributedOptimizer: backward_passes_per_step={settings.passes} with "
                f"{type(optimizer).__name__} of tf.compat.v1.train is not supported yet: use an optimizer of "
                "tf.keras.optimizers"
            )
        super().__init__(use_locking=use_locking, name=f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._exchange = FlatExchange(settings, name)
        self._computed: frozenset[int] = frozenset()
        """The variables whose gradients of all ranks were computed, and not applied yet."""

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
        return self._optimizer.apply_gradients(pairs, *args, **kwargs)

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
        return list(zip(self._exchange(gradients, variables), variables, strict=True))

"""Methods of Keras 2's optimizers that scripts for Horovod call: on TensorFlow, whose tapes they take.

There `compute_gradients` exchanges and `apply_gradients` does not. Keras 3 calls `apply_gradients` alone, so that
one exchanges, except for what these methods have exchanged just before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ...exchange.names import next_name
from .backends import backend_name

_OTHER_BACKEND = (
    "DistributedOptimizer.{name}: takes tapes of TensorFlow, and Keras runs on {backend}: let `fit` compute the "
    "gradients, or give them to `apply`"
)


class CallableList(list[Any]):
    """A list that can also be called, as `optimizer.variables()` was."""

    def __call__(self) -> list[Any]:
        """Return the list."""
        return self


class OlderNames:
    """A part of `optimizer.DistributedKerasOptimizer`."""

    _farandole_name: str
    _farandole_computed = False
    """Whether gradients were exchanged that no `apply` has used."""

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Return another optimizer like this one. Its gradients have a name of their own."""
        made = cast(Any, super()).from_config(*args, **kwargs)
        object.__setattr__(made, "_farandole_name", next_name(cls._farandole_name.rpartition(".")[0]))
        return made

    @property
    def variables(self) -> CallableList:
        """The optimizer's variables, as a list that can be called too."""
        return CallableList(cast(Any, super()).variables)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of the gradients of all ranks and their variables. See `_compute_gradients`."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return pairs of the gradients of all ranks and their variables.

        Args:
            loss: a tensor that `tape` has recorded, or a function that computes it.
            var_list: the variables, or a function that returns them.
            grad_loss: the gradient of the loss; by default ones.
            tape: the tape; by default a new one, which needs a function as `loss`.
        """
        tf = self._tensorflow("compute_gradients")
        if tape is None and not callable(loss):
            raise ValueError("`tape` is required when a `Tensor` loss is passed")
        tape = tf.GradientTape() if tape is None else tape
        if callable(loss):
            with tape:
                loss = loss()
        variables = list(var_list() if callable(var_list) else var_list)
        gradients = tape.gradient(loss, variables, grad_loss)
        return list(zip(self._exchange_early(gradients, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks, inside a graph.

        Args:
            loss: a tensor of the graph.
            params: its variables.
        """
        tf = self._tensorflow("get_gradients")
        return self._exchange_early(tf.gradients(loss, list(params)), list(params))

    def _aggregate_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Return the gradients of all ranks for pairs of this rank's gradients and variables."""
        self._tensorflow("_aggregate_gradients")
        pairs = list(grads_and_vars)
        return self._exchange_early([grad for grad, _ in pairs], [variable for _, variable in pairs])

    def _exchange_early(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        mine = cast(Any, self)
        if mine._farandole_settings.passes > 1 or mine._accumulates():
            return list(gradients)  # they are added up, and the sums are exchanged
        exchanged: list[Any] = mine._gradients()(gradients, variables)
        object.__setattr__(self, "_farandole_computed", True)
        return exchanged

    def _take_computed(self) -> bool:
        """Return whether the gradients that `apply` is given were exchanged; the next ones are not."""
        computed = self._farandole_computed
        object.__setattr__(self, "_farandole_computed", False)
        return computed

    def _tensorflow(self, name: str) -> Any:
        if backend_name() != "tensorflow":
            raise NotImplementedError(_OTHER_BACKEND.format(name=name, backend=backend_name()))
        from ...tensorflow.installed import tf

        return tf

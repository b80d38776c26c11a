"""A Keras optimizer whose gradients are those of all ranks.

What `distribute` returns is of a subclass of the optimizer's own class, with its name and its module: a file that
is saved with it loads without us, as the plain optimizer. Gradients meet in `apply`, which all of Keras calls:
before clipping, weight decay and averages of weights, as one process would do those.

[Note: accumulated] With `gradient_accumulation_steps` Keras adds up gradients itself, inside `apply`, and steps
with their mean. That mean is what travels, once a step: just before it is clipped. What Keras keeps, and
saves, is as without us.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

from ...exchange.names import key_of, next_name
from ...exchange.settings import GradientSettings
from ..variables import is_legacy
from .accumulation import PassAccumulator, refuse_loss_scale_around
from .backends import KerasGradients, backend_name, make_gradients, mark_loss, mark_step, refuse_other_backends
from .fits import watch_fits

# Methods of Keras 2's optimizers that scripts for Horovod call: on TensorFlow, whose tapes they take.
#
# There `compute_gradients` exchanges and `apply_gradients` does not. Keras 3 calls `apply_gradients` alone, so
# that one exchanges, except for what these methods have exchanged just before.

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


_LEFT_OUT = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_pattern",
    "_exclude_from_weight_decay_cache",
)
"""Attributes that are no part of an optimizer's configuration."""


class DistributedKerasOptimizer(OlderNames):
    """What is added to an optimizer's class."""

    _farandole_settings: GradientSettings
    _farandole_gradients: KerasGradients | None = None
    _farandole_passes: PassAccumulator | None = None
    _farandole_applied: Sequence[Any] = ()
    """The variables whose gradients Keras has added up. See [Note: accumulated]."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Exchange the gradients, and update the variables with those of all ranks."""
        base = cast(Any, super())
        grads = list(grads)
        if not grads:
            return base.apply(grads, trainable_variables)
        refuse_loss_scale_around(self)
        variables = (
            list(trainable_variables) if trainable_variables is not None else cast(Any, self)._trainable_variables
        )
        if len(variables) != len(grads):
            return base.apply(grads, trainable_variables)  # Keras says what is wrong
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise NotImplementedError(
                    f"DistributedOptimizer: {variable.path} is overwritten with its gradient (float8), and how "
                    "the ranks' become one is not defined"
                )
        if self._farandole_settings.passes > 1:
            self._add_pass(grads, variables)
            return None
        if not self._take_computed() and not self._accumulates():
            grads = self._gradients()(grads, variables)
        result = base.apply(grads, trainable_variables)
        mark_step()
        return result

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss of a batch, as Keras asks its optimizer to; for the records, mark when it is known."""
        return cast(Any, super()).scale_loss(mark_loss(loss))

    def _accumulates(self) -> bool:
        """Return whether Keras adds up gradients itself. See [Note: accumulated]."""
        return bool(getattr(self, "gradient_accumulation_steps", None))

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        """Note whose gradients these are, for `_clip_gradients`."""
        object.__setattr__(self, "_farandole_applied", trainable_variables)
        return cast(Any, super())._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        """Exchange what Keras has added up, and clip it. See [Note: accumulated]."""
        if self._accumulates():
            grads = self._gradients()(list(grads), self._farandole_applied)
        return cast(Any, super())._clip_gradients(grads)

    def build(self, variables: Any) -> None:
        """Make the optimizer's variables, and the sums of several backward passes."""
        cast(Any, super()).build(variables)
        if self._farandole_settings.passes > 1:
            self._accumulator().build(variables)

    @property
    def _agg_helper(self) -> PassAccumulator:
        """Under Horovod's name: programs read its `counter`."""
        return self._accumulator()

    def _accumulator(self) -> PassAccumulator:
        if self._farandole_passes is None:
            settings = self._farandole_settings
            made = PassAccumulator(
                settings.passes, averages=settings.averages_passes, sparse_as_dense=settings.sparse_as_dense
            )
            object.__setattr__(self, "_farandole_passes", made)
        assert self._farandole_passes is not None, "made before"
        return self._farandole_passes

    def _add_pass(self, grads: list[Any], variables: list[Any]) -> None:
        """Add the gradients of one backward pass; the last one of a step exchanges the sums and applies them.

        A loss scale changes only when gradients are applied, so all passes of a step have the same. Whether they
        are finite is asked of the ranks' sums: an infinity in any pass of any rank skips the step on all of them.
        """
        base, mine = cast(Any, super()), cast(Any, self)
        if not mine.built:
            mine.build(variables)
        places = [mine._get_variable_index(variable) for variable in variables]

        def step(sums: list[Any]) -> None:
            base.apply(self._gradients()(sums, variables), variables)

        self._accumulator().add(grads, places, step, lambda: mine.iterations.assign_add(1))

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of `var` on this rank: it is not exchanged."""
        self._gradients().local.add(key_of(var))

    def _gradients(self) -> KerasGradients:
        if self._farandole_gradients is None:
            made = make_gradients(self._farandole_settings, self._farandole_name)
            object.__setattr__(self, "_farandole_gradients", made)
        assert self._farandole_gradients is not None, "made before"
        return self._farandole_gradients


def distribute(optimizer: Any, settings: GradientSettings, name: str) -> Any:
    """Return an optimizer like `optimizer`, with its variables, that steps with the gradients of all ranks.

    Args:
        optimizer: of Keras 3, or of tf_keras.
        settings: how gradients meet.
        name: the same on all ranks.

    Raises:
        ValueError: what is given is no optimizer, or is distributed already.
        NotImplementedError: an optimizer of another Keras, a backend or an argument that is not built yet.
    """
    if isinstance(optimizer, type):
        raise ValueError(f"DistributedOptimizer: got the class {optimizer.__name__}, expected an object of it")
    if isinstance(optimizer, DistributedKerasOptimizer):
        raise ValueError(f"DistributedOptimizer: this {type(optimizer).__name__} is distributed already")
    if is_legacy(type(optimizer)):
        from .legacy_optimizer import DistributedLegacyOptimizer, rebuild_legacy

        if isinstance(optimizer, DistributedLegacyOptimizer):
            raise ValueError(f"DistributedOptimizer: this {type(optimizer).__name__} is distributed already")
        _refuse_strategy()
        return rebuild_legacy(optimizer, settings, name)
    import keras

    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer: got {optimizer!r}, expected an optimizer of Keras or TensorFlow")
    refuse_other_backends()
    stepping = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales the loss
    if settings.passes > 1 and getattr(stepping, "gradient_accumulation_steps", None):
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step={settings.passes} and the optimizer's "
            f"gradient_accumulation_steps={stepping.gradient_accumulation_steps} both add up gradients: give one"
        )
    _refuse_strategy()
    watch_fits()
    scaled = keras.optimizers.LossScaleOptimizer
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, scaled):
        optimizer = scaled(optimizer)  # `compile` would put one around ours: see `accumulation`
    return _rebuilt(optimizer, settings, name)


def _rebuilt(optimizer: Any, settings: GradientSettings, name: str) -> Any:
    base = type(optimizer)
    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_farandole_settings": settings,
        "_farandole_name": name,
    }
    kind = cast(Any, type(base.__name__, (DistributedKerasOptimizer, base), members))
    made = cast(Any, super(OlderNames, kind)).from_config(optimizer.get_config())
    if optimizer.built:
        made.build(optimizer._trainable_variables)
        for mine, theirs in zip(made.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    for attribute in _LEFT_OUT:
        if attribute in vars(optimizer):
            object.__setattr__(made, attribute, vars(optimizer)[attribute])
    return made


def _refuse_strategy() -> None:
    """Raise inside a scope of `tf.distribute`, whose replicas and our ranks would both exchange."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.distribute.has_strategy():
        strategy = type(tensorflow.distribute.get_strategy()).__name__
        raise ValueError(
            f"DistributedOptimizer inside {strategy}.scope(): use one of "
            "both; ranks of farandole need no tf.distribute"
        )
    keras = sys.modules.get("keras")
    if keras is not None and (spread := keras.distribution.distribution()) is not None:
        raise ValueError(
            f"DistributedOptimizer under keras.distribution's {type(spread).__name__}: use one of both; ranks of "
            "farandole need no keras.distribution"
        )

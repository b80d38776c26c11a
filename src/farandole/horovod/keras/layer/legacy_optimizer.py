"""A tf_keras optimizer whose gradients are those of all ranks; see `optimizer` for that of Keras 3.

[Note: computed] Keras 2 computes gradients in one method of the optimizer and applies them in another, and scripts
call either. Gradients meet where they are computed, as in Horovod: then scripts clip and look at those of all
ranks, and a LossScaleOptimizer around ours asks whether those are finite. A step that was computed elsewhere, by
a plain tape, meets where it is applied. So what was computed here is remembered until it is applied.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

from ...exchange.names import key_of
from ...exchange.settings import GradientSettings
from ...tensorflow.gradients import FlatExchange, mark_loss
from ...tensorflow.installed import tf
from ...tensorflow.ops.inputs import not_converted
from ..variables import build_optimizer
from .accumulation import LEGACY, PassAccumulator, refuse_loss_scale_around
from .fits import watch_legacy_fits

Pairs = list[tuple[Any, Any]]
_LEFT_OUT = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_names")
"""Attributes that are no part of an optimizer's configuration."""


class DistributedLegacyOptimizer:
    """What is added to an optimizer's class."""

    _farandole_settings: GradientSettings
    _farandole_exchange: FlatExchange
    _farandole_passes: PassAccumulator | None
    _farandole_computed: frozenset[int]
    """The variables whose gradients of all ranks were computed, and not applied yet. See [Note: computed]."""

    @not_converted
    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Pairs:
        """Return pairs of gradient and variable: the gradients of all ranks.

        Args:
            loss: a tensor, or a function without arguments that returns one.
            var_list: variables, or a function that returns them.
            tape: what has recorded `loss`; needed for a tensor.
        """
        base = cast(Any, super())
        if not hasattr(base, "compute_gradients"):  # of tf_keras.optimizers.legacy
            return self._compute_gradients(loss, var_list, tape=tape)
        return self._exchanged(base.compute_gradients(_marked(loss, tape), var_list, tape))

    @not_converted
    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Pairs:
        """Return the same, under the name that programs for Horovod call. `grad_loss`: the gradient of `loss`."""
        base = cast(Any, super())
        if hasattr(base, "_compute_gradients"):
            return self._exchanged(base._compute_gradients(_marked(loss, tape), var_list, grad_loss, tape=tape))
        if grad_loss is not None:
            raise ValueError("_compute_gradients: only optimizers of tf_keras.optimizers.legacy take grad_loss")
        return self.compute_gradients(loss, var_list, tape)

    @not_converted
    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks with respect to `params`, in graphs of TensorFlow 1."""
        found = cast(Any, super()).get_gradients(loss, params)
        return [gradient for gradient, _ in self._exchanged(list(zip(found, params, strict=True)))]

    @not_converted
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Update the variables with the gradients of all ranks.

        Args:
            grads_and_vars: pairs of gradient and variable.
            args: as for the optimizer's own.
            kwargs: the same.
        """
        base = cast(Any, super())
        pairs = list(grads_and_vars)
        _refuse_keras_3(self, pairs)
        keys = {key_of(variable) for _, variable in pairs}
        if not pairs:
            return base.apply_gradients(pairs, *args, **kwargs)
        if keys <= self._farandole_computed:
            object.__setattr__(self, "_farandole_computed", frozenset())
            return base.apply_gradients(pairs, *args, **kwargs)
        refuse_loss_scale_around(self)
        if self._farandole_passes is None:
            return base.apply_gradients(self._meet(pairs), *args, **kwargs)
        return self._add_pass(self._farandole_passes, pairs, args, kwargs)

    def _add_pass(self, passes: PassAccumulator, pairs: Pairs, args: Any, kwargs: Any) -> Any:
        """Add the gradients of one backward pass; the last one of a step exchanges the sums and applies them."""
        base, mine = cast(Any, super()), cast(Any, self)
        gradients, variables = map(list, zip(*pairs, strict=True))
        with tf.init_scope():
            build_optimizer(self, variables)
            iterations = mine.iterations
            passes.build_once(variables)

        def step(sums: list[Any]) -> None:
            base.apply_gradients(self._meet(list(zip(sums, variables, strict=True))), *args, **kwargs)

        passes.add(gradients, passes.places(variables), step, lambda: iterations.assign_add(1))
        return iterations

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of `var` on this rank: it is not exchanged."""
        self._farandole_exchange.local.add(key_of(var))

    @property
    def _agg_helper(self) -> PassAccumulator | None:
        """Under Horovod's name: programs read its `counter`."""
        return self._farandole_passes

    def _exchanged(self, pairs: Pairs) -> Pairs:
        """Return what was computed, as the gradients of all ranks; those of several passes meet when applied."""
        _refuse_keras_3(self, pairs)
        if self._farandole_passes is not None or not pairs:
            return pairs
        computed = frozenset(key_of(variable) for _, variable in pairs)
        object.__setattr__(self, "_farandole_computed", computed)
        return self._meet(pairs)

    def _meet(self, pairs: Pairs) -> Pairs:
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._farandole_exchange(gradients, variables), variables, strict=True))


def _refuse_keras_3(optimizer: Any, pairs: Pairs) -> None:
    """Raise ValueError for variables of Keras 3, before anything is exchanged: tf_keras cannot update them."""
    for _, variable in pairs:
        if type(variable).__module__.partition(".")[0] == "keras":
            raise ValueError(
                f"DistributedOptimizer: {type(optimizer).__name__} is an optimizer of tf_keras (Keras 2), and "
                f"{variable.path} is a variable of Keras 3: use keras.optimizers, or a model of tf_keras"
            )


def _marked(loss: Any, tape: Any) -> Any:
    """Return the loss; for the records, mark when it is known."""
    if tape is None or callable(loss):
        return loss
    with tape:
        return mark_loss(loss)


def rebuild_legacy(optimizer: Any, settings: GradientSettings, name: str) -> Any:
    """Return an optimizer of tf_keras like `optimizer`, with its state, that steps with all ranks' gradients.

    Raises:
        ValueError: what is given is no optimizer.
        NotImplementedError: an argument that is not supported yet.
    """
    base = type(optimizer)
    if "tf_keras" in sys.modules:
        watch_legacy_fits(sys.modules["tf_keras"])
    if not hasattr(optimizer, "apply_gradients") or not hasattr(optimizer, "get_config"):
        raise ValueError(f"DistributedOptimizer: got {optimizer!r}, expected an optimizer of Keras or TensorFlow")
    if settings.passes > 1 and hasattr(optimizer, "inner_optimizer"):
        raise NotImplementedError(
            f"DistributedOptimizer: backward_passes_per_step={settings.passes} with a LossScaleOptimizer is not "
            "supported yet: leave one of both out"
        )
    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_farandole_settings": settings,
    }
    kind = cast(Any, type(base.__name__, (DistributedLegacyOptimizer, base), members))
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "_built", False) or getattr(inner, "_weights", None):
        made = object.__new__(kind)
        made.__dict__.update(vars(optimizer))  # with its variables: it does not say for which it has them
    else:
        made = kind.from_config(optimizer.get_config())
        for attribute in _LEFT_OUT:
            if attribute in vars(optimizer):
                object.__setattr__(made, attribute, vars(optimizer)[attribute])
    passes = None
    if settings.passes > 1:
        passes = PassAccumulator(
            settings.passes,
            averages=settings.averages_passes,
            sparse_as_dense=settings.sparse_as_dense,
            tools=LEGACY,
        )
    for attribute, value in (
        ("_farandole_exchange", FlatExchange(settings, name)),  # none of these is the program's to save
        ("_farandole_passes", passes),
        ("_farandole_computed", frozenset()),
    ):
        object.__setattr__(made, attribute, value)
    return made

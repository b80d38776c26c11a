"""Models, variables and optimizers of both Keras, as the watchers of `fit` need them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...array_verification import Array, leaves_of
from ...common.running import find_running
from ...exchange.names import key_of
from ..variables import as_numpy, is_legacy

SEED_STATE = "seed_generator_state"
"""How Keras names the variable in which a generator of seeds keeps its seed and its counter."""


def backend_of(model: Any) -> str:
    """Return what a model computes with: "tensorflow", "torch", ..."""
    if is_legacy(type(model)):
        return "tensorflow"
    import keras

    return str(keras.backend.backend())


def steps_of_call(model: Any) -> int:
    """Return how many steps one call of the train function makes."""
    return int(as_numpy(model.steps_per_execution)) if is_legacy(type(model)) else int(model.steps_per_execution)


def is_distributed(model: Any) -> bool:
    """Return whether the gradients of a model's optimizer meet those of all ranks."""
    settings = getattr(getattr(model, "optimizer", None), "_farandole_settings", None)
    running = find_running()
    return settings is not None and running is not None and settings.process_set.size() == running.world.size


def to_numpy(value: Any) -> Array | None:
    """Return a tensor or variable of the backend as an array; None for what is none, or sparse."""
    if is_tensorflows(value):
        return np.array(value.numpy())
    import keras

    try:
        return np.array(keras.ops.convert_to_numpy(value))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None


def arrays_of(batch: Any) -> list[Array] | None:
    """Return what lies in a batch as arrays; None where something in it is none."""
    found = [to_numpy(each) for each in leaves_of(batch)]
    arrays = [each for each in found if each is not None]
    return arrays if len(arrays) == len(found) else None


def beginning_of(variable: Any, most: int) -> Array:
    """Return the first elements of a variable, without a copy of the others."""
    if is_tensorflows(variable):
        from ...tensorflow.installed import tf

        return np.asarray(tf.reshape(variable, [-1])[:most].numpy())
    import keras

    return np.asarray(keras.ops.convert_to_numpy(keras.ops.ravel(variable)[:most]))


def shared_weights(model: Any) -> list[Any]:
    """Return the weights that are trained alike on all ranks."""
    found = (getattr(model.optimizer, name, None) for name in ("_farandole_gradients", "_farandole_exchange"))
    gradients = next((each for each in found if each is not None), None)
    local: set[int] = getattr(gradients, "local", set())
    return [each for each in model.trainable_variables if key_of(each) not in local]


def seed_states(model: Any) -> list[Any]:
    """Return the variables of the generators of seeds that a model draws from, Keras's own one included.

    None for tf_keras: it keeps seeds in other places.
    """
    if is_legacy(type(model)):
        return []
    found = [each for each in model.variables if getattr(each, "name", "") == SEED_STATE]
    shared = _global_generator()
    return found if shared is None else [*found, shared.state]


def batches_per_step(model: Any) -> int:
    """Return how many batches one step of the optimizer has."""
    optimizer = getattr(model, "optimizer", None)
    settings = getattr(optimizer, "_farandole_settings", None)
    accumulated = (
        getattr(each, "gradient_accumulation_steps", None) or 1
        for each in (optimizer, getattr(optimizer, "inner_optimizer", None))
    )
    return max(getattr(settings, "passes", 1), *accumulated)


def is_tensorflows(value: Any) -> bool:
    """Return whether a tensor or variable is TensorFlow's own, and not one of Keras 3."""
    return type(value).__module__.partition(".")[0] == "tensorflow"


def _global_generator() -> Any:
    """Return the generator that layers without a seed of their own draw from; None before it is made."""
    try:
        from keras.src.backend.common.global_state import get_global_attribute
        from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    except ImportError:  # a private place of Keras: it may move
        return None
    return get_global_attribute(GLOBAL_SEED_GENERATOR)


def on_torch() -> bool:
    """Return whether Keras runs on torch."""
    import keras

    return bool(keras.backend.backend() == "torch")


def learning_rates(model: Any) -> list[float]:
    """Return the learning rate, as the list that the comparison of models takes."""
    try:
        return [float(to_numpy(model.optimizer.learning_rate))]  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):  # an optimizer without one
        return []

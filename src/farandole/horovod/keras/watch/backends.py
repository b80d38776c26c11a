"""Models, variables and optimizers of Keras 3, as the watchers of `fit` need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ...common.running import find_running
from ...exchange.names import key_of
from ...verify.arrays import Array

SEED_STATE = "seed_generator_state"
"""How Keras names the variable in which a generator of seeds keeps its seed and its counter."""


def is_distributed(model: Any) -> bool:
    """Return whether the gradients of a model's optimizer meet those of all ranks."""
    settings = getattr(getattr(model, "optimizer", None), "_farandole_settings", None)
    running = find_running()
    return settings is not None and running is not None and settings.process_set.size() == running.world.size


def to_numpy(value: Any) -> Array | None:
    """Return a tensor or variable of the backend as an array; None for what is none, or sparse."""
    import keras

    try:
        return np.array(keras.ops.convert_to_numpy(value))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None


def beginning_of(variable: Any, most: int) -> Array:
    """Return the first elements of a variable, without a copy of the others."""
    import keras

    return np.asarray(keras.ops.convert_to_numpy(keras.ops.ravel(variable)[:most]))


def label_of(variable: Any) -> str:
    """Return what a reader knows a variable by, without what Keras counts up."""
    path = str(getattr(variable, "path", variable))
    return path.partition("/")[2] or path


def shared_weights(model: Any) -> list[Any]:
    """Return the weights that are trained alike on all ranks."""
    gradients = getattr(model.optimizer, "_farandole_gradients", None)
    local: set[int] = getattr(gradients, "local", set())
    return [each for each in model.trainable_variables if key_of(each) not in local]


def seed_states(model: Any) -> list[Any]:
    """Return the variables of the generators of seeds that a model draws from, Keras's own one included."""
    found = [each for each in model.variables if getattr(each, "name", "") == SEED_STATE]
    shared = _global_generator()
    return found if shared is None else [*found, shared.state]


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


def torch_random_state() -> bytes:
    """Return the state of torch's generators, of which dropout draws there; empty on other backends."""
    if not on_torch():
        return b""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return b"".join(state.numpy().tobytes() for state in states)


def learning_rates(model: Any) -> list[float]:
    """Return the learning rate, as the list that the comparison of models takes."""
    try:
        return [float(to_numpy(model.optimizer.learning_rate))]  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):  # an optimizer without one
        return []


def layers_of(model: Any) -> Iterator[Any]:
    """Return all layers of a model, those inside others included."""
    flatten = getattr(model, "_flatten_layers", None)
    if flatten is not None:
        yield from flatten()
        return
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from layers_of(layer)


def normalizing_layers(model: Any) -> list[Any]:
    """Return the layers that normalise by the statistics of this rank's own samples."""
    return [
        each
        for each in layers_of(model)
        if any(kind.__name__ == "BatchNormalization" for kind in type(each).__mro__)
        and type(each).__name__ != "SyncBatchNormalization"
        and each.trainable
    ]

"""What differs between the two Keras of TensorFlow, beside the exchange: Keras 3, and tf_keras (Keras 2).

An optimizer of tf_keras is of one of two families: the newer ones, and those of `tf_keras.optimizers.legacy`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


def is_legacy(kind: type) -> bool:
    """Return whether a class is of tf_keras. The class says so: a process can hold both."""
    return any(each.__module__.partition(".")[0] == "tf_keras" for each in kind.__mro__)


def as_numpy(variable: Any) -> np.ndarray[Any, Any]:
    """Return the value of a variable of either Keras, or of TensorFlow. It may be a view."""
    keras = sys.modules.get("keras")
    if hasattr(variable, "numpy") and (keras is None or not isinstance(variable, keras.Variable)):
        return np.asarray(variable.numpy())
    import keras as keras_3

    return np.asarray(keras_3.ops.convert_to_numpy(variable))


def label_for(variable: Any) -> str:
    """Return what messages call a variable."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer, the same on all ranks; none when there is no optimizer."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make the optimizer's variables, where it was not done."""
    if optimizer is None:
        return
    if hasattr(optimizer, "_create_all_weights"):  # of tf_keras.optimizers.legacy
        optimizer._create_all_weights(list(variables))
    elif not getattr(optimizer, "built", False):  # those of tf_keras have no `built`: they look for themselves
        optimizer.build(list(variables))


def velocities(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the velocities of SGD with momentum; of other optimizers nothing holds the rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if type(inner).__name__ != "SGD" or not getattr(inner, "momentum", 0):
        return []
    if not hasattr(inner, "_create_all_weights"):
        return list(getattr(inner, "momentums", None) or ())
    inner._create_all_weights(list(variables))
    return [inner.get_slot(variable, "momentum") for variable in variables]

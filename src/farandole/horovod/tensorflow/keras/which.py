"""Which Keras `tf.keras` is: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS=1 was set before TensorFlow's import.

It decides what callbacks and loaded models are of. What an optimizer is of, its class says.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ...keras.layer.backends import backend_name
from ...keras.variables import is_legacy
from ..installed import tf

_MISSING = (
    "farandole.horovod.tensorflow.keras: TF_USE_LEGACY_KERAS is set, but tf_keras is not installed: pip install "
    "--no-deps tf_keras, of the same minor version as TensorFlow (its own requirements bring a second TensorFlow "
    "beside tensorflow-cpu)"
)


def find_keras() -> tuple[Any, bool]:
    """Return `tf.keras`, and whether it is tf_keras.

    Raises:
        ImportError: it cannot be used: it is missing, or does not run on TensorFlow.
    """
    try:
        legacy = is_legacy(tf.keras.optimizers.Optimizer)
    except ImportError:
        if importlib.util.find_spec("tf_keras") is None:
            raise ImportError(_MISSING) from None
        raise
    if not legacy and backend_name() != "tensorflow":
        raise ImportError(
            f"farandole.horovod.tensorflow.keras: Keras runs on {backend_name()} (KERAS_BACKEND); use "
            "farandole.horovod.keras, or set KERAS_BACKEND=tensorflow"
        )
    return tf.keras, legacy


keras, is_tf_keras = find_keras()

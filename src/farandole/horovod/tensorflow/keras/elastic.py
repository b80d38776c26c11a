"""`hvd.elastic` for `tf.keras`, whichever Keras that is: see `horovod.keras.elastic`."""

from __future__ import annotations

from typing import Any

from ...keras import elastic as of_keras_3
from ...keras.layer.elastic import ELASTIC_CALLBACKS, KerasState, run
from ...keras.layer.front_end import bind_all
from .which import is_tf_keras, keras

_bound: dict[str, Any] = bind_all(ELASTIC_CALLBACKS, keras, __name__) if is_tf_keras else vars(of_keras_3)
CommitStateCallback = _bound["CommitStateCallback"]
UpdateBatchStateCallback = _bound["UpdateBatchStateCallback"]
UpdateEpochStateCallback = _bound["UpdateEpochStateCallback"]

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

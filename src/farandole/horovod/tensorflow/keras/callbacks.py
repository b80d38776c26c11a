"""Horovod's callbacks for `tf.keras`, whichever Keras that is."""

from __future__ import annotations

from typing import Any

from ...keras import callbacks as of_keras_3
from ...keras.layer.fits import watch_legacy_fits
from ...keras.layer.front_end import bind
from .which import is_tf_keras, keras

_bound: dict[str, Any] = bind(keras, __name__) if is_tf_keras else vars(of_keras_3)
BroadcastGlobalVariablesCallback = _bound["BroadcastGlobalVariablesCallback"]
MetricAverageCallback = _bound["MetricAverageCallback"]
LearningRateScheduleCallback = _bound["LearningRateScheduleCallback"]
LearningRateWarmupCallback = _bound["LearningRateWarmupCallback"]
BestModelCheckpoint = _bound["BestModelCheckpoint"]

if is_tf_keras:
    watch_legacy_fits(keras)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

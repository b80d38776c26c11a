"""Horovod's callbacks, as classes of Keras 3."""

from __future__ import annotations

from typing import Any

from .layer.backends import import_keras
from .layer.fits import watch_fits
from .layer.front_end import bind

_bound: dict[str, Any] = bind(import_keras("keras", "keras"), __name__)
BroadcastGlobalVariablesCallback = _bound["BroadcastGlobalVariablesCallback"]
MetricAverageCallback = _bound["MetricAverageCallback"]
LearningRateScheduleCallback = _bound["LearningRateScheduleCallback"]
LearningRateWarmupCallback = _bound["LearningRateWarmupCallback"]
BestModelCheckpoint = _bound["BestModelCheckpoint"]
watch_fits()

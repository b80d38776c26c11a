"""Callbacks, as classes of one Keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from .callbacks import BroadcastVariables, LearningRateSchedule, LearningRateWarmup, MetricAverage
from .observed import ObservedFit

CALLBACKS = {
    "BroadcastGlobalVariablesCallback": BroadcastVariables,
    "MetricAverageCallback": MetricAverage,
    "LearningRateScheduleCallback": LearningRateSchedule,
    "LearningRateWarmupCallback": LearningRateWarmup,
}


def bind(keras: Any, module: str) -> dict[str, type]:
    """Return Horovod's callbacks by name, as classes of `keras`."""
    made = bind_all(CALLBACKS, keras, module)
    made["BestModelCheckpoint"] = _checkpoint(keras, module)
    return made


class _ForBoth:
    """What `fit` of tf_keras asks callbacks, and those of Keras 3 do not answer: they run in both."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def bind_all(kinds: Mapping[str, type], keras: Any, module: str) -> dict[str, type]:
    """Return what each of `kinds` does as a callback of `keras`, which may be Keras 3 or tf_keras."""
    return {
        name: type(
            name,
            (ObservedFit, kind, keras.callbacks.Callback, _ForBoth),
            {"__doc__": kind.__doc__, "__module__": module},
        )
        for name, kind in kinds.items()
    }


def _checkpoint(keras: Any, module: str) -> type:
    base = keras.callbacks.ModelCheckpoint

    def __init__(  # noqa: N807 - the constructor of a class that is made below
        self: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        cast(Any, base).__init__(
            self,
            f"best{ending}",  # Keras 3 takes no None; scripts set `filepath`
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    text = "A ModelCheckpoint that keeps the best model; set its `filepath`."
    return type("BestModelCheckpoint", (base,), {"__init__": __init__, "__doc__": text, "__module__": module})

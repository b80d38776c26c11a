"""`hvd.elastic` for Keras 3.

::

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(..., epochs=epochs - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])

    train(state)
"""

from __future__ import annotations

from typing import Any

from .layer.backends import import_keras
from .layer.elastic import ELASTIC_CALLBACKS, KerasState, run
from .layer.front_end import bind_all

_bound: dict[str, Any] = bind_all(ELASTIC_CALLBACKS, import_keras("keras", "keras"), __name__)
CommitStateCallback = _bound["CommitStateCallback"]
UpdateBatchStateCallback = _bound["UpdateBatchStateCallback"]
UpdateEpochStateCallback = _bound["UpdateEpochStateCallback"]

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

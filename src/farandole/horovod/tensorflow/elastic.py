"""`hvd.elastic` for TensorFlow.

::

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, batches):
            step(...)
            state.commit()

    train(state)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..keras.layer.elastic import Array, KerasState, VariablesState, run
from .installed import tf


class TensorFlowKerasState(KerasState):
    """A model of either Keras and its optimizer as the state of an elastic job. `backend` is ignored."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(VariablesState):
    """Variables as the state of an elastic job. Rank 0's are taken when it is made, as in Horovod."""

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        """Take the variables as they are.

        Args:
            variables: of TensorFlow or Keras; by default all of the session's graph.
            session: of TensorFlow 1, in which the variables are; needed in its graphs.
            kwargs: further values, as attributes.

        Raises ValueError where neither is given.
        """
        if session is None and (variables is None or not tf.executing_eagerly()):
            raise ValueError(
                "TensorFlowState: give the variables, and in graphs of TensorFlow 1 the session that has them"
            )
        self.session = session
        if variables is None:
            with session.graph.as_default():
                variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        super().__init__(lambda: self.variables, **kwargs)

    def _read(self) -> list[Array]:
        if self.session is None:
            return super()._read()
        return [np.asarray(value) for value in self.session.run(self.variables)]

    def _write(self, values: Sequence[Array]) -> None:
        if self.session is None:
            super()._write(values)
            return
        for variable, value in zip(self.variables, values, strict=True):
            variable.load(value, self.session)


__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

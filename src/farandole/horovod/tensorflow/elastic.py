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

from collections.abc import Iterable
from typing import Any

from ..keras.layer.elastic import KerasState, VariablesState, run
from .errors import refuse_session, session_refused


class TensorFlowKerasState(KerasState):
    """A model of either Keras and its optimizer as the state of an elastic job. `backend` is ignored."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(VariablesState):
    """Variables as the state of an elastic job. Rank 0's are taken when it is made, as in Horovod."""

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        """Take the variables as they are.

        Args:
            variables: of TensorFlow or Keras.
            session: Horovod has this argument; only None is supported.
            kwargs: further values, as attributes.

        Raises:
            ValueError: no variables were given.
            NotImplementedError: a session of TensorFlow 1.
        """
        if session is not None:
            raise session_refused("TensorFlowState")
        refuse_session("TensorFlowState")
        if variables is None:
            raise ValueError("TensorFlowState: give the variables")
        self.variables = list(variables)
        super().__init__(lambda: self.variables, **kwargs)


__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

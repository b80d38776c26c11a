"""`hvd.elastic` for Keras: the variables of a model and its optimizer, and plain values, as the state of a job.

A commit is whole: what is kept is replaced when all of the new is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...common.basics import basics
from ...common.elastic import ObjectState, run_fn
from ...common.objects import broadcast_object
from ...exchange.names import broadcast_arrays, failures, made_objects, meet_again
from ..variables import as_numpy, build_optimizer, label_for, optimizer_variables
from .callbacks import Logs

Array = np.ndarray[Any, Any]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, ...)` go on when ranks die, or hosts come or go.

    `func` is begun again with the state of the last commit (after a failure) or as it is (when hosts came or went
    and all ranks left together); so it must take epoch and batch from `state`.
    """

    @functools.wraps(func)
    def with_our_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            failure = failures.behind(error)
            if failure is None or failure is error:
                raise
            raise type(failure)(str(failure)) from error

    @functools.wraps(func)
    def elastic(*args: Any, **kwargs: Any) -> Any:
        before = made_objects.mark()

        def reset() -> None:
            made_objects.go_back(before)  # see [Note: made again]
            meet_again()

        return run_fn(with_our_errors, reset)(*args, **kwargs)

    return elastic


class VariablesState(ObjectState):
    """Variables, and further values as attributes. `variables`: returns them, the same on all ranks."""

    def __init__(self, variables: Callable[[], list[Any]], **kwargs: Any) -> None:
        self._variables = variables
        self._kept: list[Array] = []
        super().__init__(bcast_object=broadcast_object, get_rank=basics.rank, **kwargs)

    def save(self) -> None:
        """Keep everything as it is now."""
        attributes, kept = self._captured(), [np.array(value) for value in self._read()]
        self._saved_state, self._kept = attributes, kept

    def restore(self) -> None:
        """Go back to what was kept last, all of it."""
        self._write(self._kept)
        super().restore()

    def sync(self) -> None:
        """Take everything from rank 0, and keep it when all of it is there."""
        labels = [label_for(each) for each in self._variables()]
        self._write(broadcast_arrays(labels, self._read(), 0))
        for name, value in self._received().items():
            setattr(self, name, value)
        self.save()

    def _read(self) -> list[Array]:
        """Return the values of the variables."""
        return [as_numpy(each) for each in self._variables()]

    def _write(self, values: Sequence[Array]) -> None:
        """Overwrite the variables."""
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)


class KerasState(VariablesState):
    """A model of Keras with its optimizer, and further values, as the state of an elastic job.

    ``state.model`` and ``state.optimizer`` are what was given; the other values are attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """`model`: built; `optimizer`: by default the model's.

        Raises ValueError for a model without variables.
        """
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        build_optimizer(optimizer, model.trainable_variables)  # on all ranks alike: a new one has made no step
        self.model, self.optimizer = model, optimizer
        super().__init__(self._all_variables, **kwargs)

    def _all_variables(self) -> list[Any]:
        return [*self.model.weights, *optimizer_variables(self.optimizer)]


class CommitState:
    """Commits a state after each `batches_per_commit` batches, and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin to count."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commit."""
        self.commit()

    def commit(self) -> None:
        """Commit the state. Scripts override it."""
        self.state.commit()


class UpdateBatchState:
    """Keeps `state.batch`: how many batches of the epoch are done. After a reset the epoch is as much shorter."""

    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin with a new number of steps."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Leave out what was done before a reset."""
        steps = self.params.get("steps")
        if steps:
            self.steps_per_epoch = self.steps_per_epoch or steps
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Begin anew."""
        self.state.batch = 0


class UpdateEpochState:
    """Keeps `state.epoch`: how many epochs are done."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Count from where the state is."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Count."""
        self.state.epoch = self.initial_epoch + epoch + 1


ELASTIC_CALLBACKS: dict[str, type] = {
    "CommitStateCallback": CommitState,
    "UpdateBatchStateCallback": UpdateBatchState,
    "UpdateEpochStateCallback": UpdateEpochState,
}

"""What our callbacks see of a `fit`, told to the watch of steps: batches, epochs, evaluations, losses.

Every callback of ours tells it, so a script has to add none for it; what a second one tells is known already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ...exchange.step_watch import StepWatch, tell
from .backends import backend_name

Logs = dict[str, Any] | None


class ObservedFit:
    """Comes before the classes of a callback: tells what happens, and passes the call on."""

    params: dict[str, Any] | None

    def on_train_begin(self, logs: Logs = None) -> None:
        """A `fit` begins."""
        front_end = f"keras on {_backend_of(type(self))}"
        self._tell(lambda watch: watch.train_begins(), front_end)
        if front_end == "keras on torch":
            self._tell(lambda watch: watch.watch_loaders())
        cast(Any, super()).on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """An epoch begins."""
        self._tell(lambda watch: watch.epoch_begins(epoch, self._count("steps"), self._count("epochs")))
        cast(Any, super()).on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """A batch begins, or as many as Keras runs at once."""
        cast(Any, super()).on_train_batch_begin(batch, logs)
        self._tell(lambda watch: watch.batch_begins(batch))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """It is over."""
        self._tell(lambda watch: watch.batch_ends(batch, _loss(logs)))
        cast(Any, super()).on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs = None) -> None:
        """An evaluation begins."""
        self._tell(lambda watch: watch.evaluation_begins())
        cast(Any, super()).on_test_begin(logs)

    def on_test_end(self, logs: Logs = None) -> None:
        """It is over."""
        self._tell(lambda watch: watch.evaluation_ends())
        cast(Any, super()).on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """An epoch is over, and its callbacks follow."""
        self._tell(lambda watch: watch.epoch_ends())
        cast(Any, super()).on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Logs = None) -> None:
        """The `fit` is over."""
        self._tell(lambda watch: watch.train_ends())
        cast(Any, super()).on_train_end(logs)

    def _tell(self, step: Callable[[StepWatch], object], front_end: str = "") -> None:
        tell(step, front_end)

    def _count(self, name: str) -> int | None:
        value = (self.params or {}).get(name)
        return value if type(value) is int else None


def _backend_of(kind: type) -> str:
    is_legacy = any(base.__module__.partition(".")[0] == "tf_keras" for base in kind.__mro__)
    return "tensorflow" if is_legacy else backend_name()


def _loss(logs: Logs) -> float | None:
    """Return Keras's loss: a mean since the epoch began."""
    value = (logs or {}).get("loss")
    return None if value is None else float(value)

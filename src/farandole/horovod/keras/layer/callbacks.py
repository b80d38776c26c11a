"""What Horovod's callbacks do, without the class `Callback` of the Keras whose `fit` runs them (`front_end`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.basics import basics
from ...common.exceptions import HorovodMismatchError
from ...common.objects import allgather_object
from ...exchange.names import broadcast_arrays, key_of
from ..variables import as_numpy, build_optimizer, label_for, optimizer_variables, velocities

Logs = dict[str, Any] | None


class BroadcastVariables:
    """Gives all ranks the model and the optimizer of one of them, once, when training begins.

    Before the first batch where the model has its variables on all ranks, else after it.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """`root_rank`: whose variables are sent; `local_variables`: those that each rank keeps."""
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local: set[int] = set()
        several = isinstance(local_variables, (list, tuple, set))
        for variable in (local_variables if several else [local_variables]) if local_variables is not None else ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep its `var`."""
        if not hasattr(var, "assign"):
            raise ValueError("All local variables must be of tf.Variable type.")
        self._local.add(key_of(var))

    def set_model(self, model: Any) -> None:
        """Take the model. TensorFlow's exchange cannot be inside an XLA program; Keras makes one on a GPU."""
        super().set_model(model)  # type: ignore[misc]
        if getattr(model, "jit_compile", False):
            model.jit_compile = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast, if all ranks have the variables of the model."""
        if self.broadcast_done or not all(allgather_object(bool(self.model.built))):
            return
        # Keras builds it in the first batch.
        build_optimizer(getattr(self.model, "optimizer", None), self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast, if it was not done."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        variables = [*self.model.weights, *optimizer_variables(getattr(self.model, "optimizer", None))]
        broadcast_keras_variables([each for each in variables if key_of(each) not in self._local], self.root_rank)
        self.broadcast_done = True


def broadcast_keras_variables(variables: list[Any], root_rank: int) -> None:
    """Overwrite variables of either Keras with those of rank `root_rank`, on any backend."""
    values = broadcast_arrays(
        [label_for(each) for each in variables], [as_numpy(each) for each in variables], root_rank
    )
    if basics.rank() == root_rank:
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class MetricAverage:
    """Averages the metrics of an epoch over the ranks, in place: later callbacks and the History see the means."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average every entry of `logs`."""
        if logs is None:
            return
        everybody = allgather_object({name: float(value) for name, value in logs.items()})
        for rank, theirs in enumerate(everybody):
            if theirs.keys() != logs.keys():
                different = ", ".join(sorted(theirs.keys() ^ logs.keys()))
                raise HorovodMismatchError(
                    f"MetricAverageCallback: rank {rank} and rank {basics.rank()} differ in metrics, {different}; "
                    "compile alike, and give validation data on all ranks or on none"
                )
        for name in sorted(logs):
            logs[name] = sum(theirs[name] for theirs in everybody) / len(everybody)


class LearningRateSchedule:
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` for start_epoch <= epoch < end_epoch.

    A constant multiplier m means m ** (epoch - start_epoch). With `staircase` the rate changes between epochs
    only, else in each batch, with fractions of epochs.
    """

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch: int | None = None
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.staircase = True
            factor = multiplier
            self.multiplier = lambda epoch: factor ** (epoch - self.start_epoch)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out how many steps an epoch has."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                    f"parameter to the {type(self).__name__}() or upgrade to the latest version of Keras."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note which epoch it is."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate of this batch."""
        epoch = self.current_epoch or 0
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._adjust(epoch)
        else:
            self._adjust(epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Show the rate in the logs."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            # Velocities hold the old rate. A momentum multiplied for this batch would do the same, but it is a
            # constant of the step that Keras has traced.
            for velocity in velocities(self.model.optimizer, self.model.trainable_variables):
                velocity.assign(velocity * (new / old))


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from that of one rank to `initial_lr`, batch by batch, in `warmup_epochs`.

    Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677). Without `initial_lr`, as guides for
    older versions write it, that is what the optimizer has when training begins.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The last batch of the last epoch reaches initial_lr.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            alone = 1.0 / basics.size()
            return alone + (1.0 - alone) * epoch / warmup_epochs

        super().__init__(
            0.0 if initial_lr is None else initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose
        self._asks_optimizer = initial_lr is None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Learn the rate to reach, where none was given."""
        super().on_train_begin(logs)
        if self._asks_optimizer:
            self._asks_optimizer = False
            self.initial_lr = self._rate()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and basics.rank() == 0:
            _say(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


def _say(text: str) -> None:
    import sys

    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

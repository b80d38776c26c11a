"""The functions that `horovod.keras` and `horovod.tensorflow.keras` have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, cast

import numpy as np

from ...common.compression import CodecCompressor, check_compression, name_of
from ...common.operations import begin, operation_names, set_number, wait
from ...common.process_sets import global_process_set
from ...common.reductions import (
    Average,
    check_sum_or_average,
    handle_average_backwards_compatibility,
    reduction_of,
)
from ...exchange.names import as_array, as_torch, next_name
from ...exchange.settings import local_variables, make_settings
from ...exchange.step_watch import StepWatch, tell
from ...named_ops.operations import Kind, Request
from .backends import backend_name
from .callbacks import BroadcastVariables, LearningRateSchedule, LearningRateWarmup, MetricAverage
from .optimizer import distribute

# Callbacks, as classes of one Keras.

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


def make_optimizer(optimizer: Any, name: str | None, compression: Any, op: int, **others: Any) -> Any:
    """Return a distributed Keras optimizer; `others` are the fields of `make_settings`."""
    from ...common.reductions import Sum

    if op not in (Average, Sum):
        raise ValueError(f"op currently only supports Average and Sum (got {op!r})")
    settings = make_settings(compression, op=op, **others)
    return distribute(optimizer, settings, next_name(name or f"Distributed{type(optimizer).__name__}"))


def keep_layers_local(optimizer: Any, local_layers: Any) -> Any:
    """Return a distributed optimizer, which keeps the gradients of one or several layers on this rank."""
    for variable in local_variables(local_layers):
        optimizer.register_local_var(variable)
    return optimizer


def allreduce_value(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | None,
    compression: Any,
) -> Any:
    """Return the reduction of a tensor-like value, as a tensor of the backend."""
    op = handle_average_backwards_compatibility(op, average)
    codec = "none"
    if isinstance(check_compression(compression), CodecCompressor):
        codec = compression.text
    elif name_of(compression) != "NoneCompressor":
        raise NotImplementedError(f"allreduce of a value with {name_of(compression)}: use Compression.none")
    return _run("allreduce", value, name, reduction=reduction_of(op), prescale=prescale_factor,
                postscale=postscale_factor, codec=codec)  # fmt: skip


def allgather_value(value: Any, name: str | None) -> Any:
    """Return the rows of all ranks' values, as a tensor of the backend."""
    return _run("allgather", value, name)


def broadcast_value(value: Any, root_rank: int, name: str | None) -> Any:
    """Return the value of rank `root_rank`, as a tensor of the backend."""
    return _run("broadcast", value, name, in_place=True, root=root_rank)


def reducescatter_value(value: Any, name: str | None, op: int) -> Any:
    """Return this rank's rows of the reduction, as a tensor of the backend."""
    check_sum_or_average(op)
    return _run("reducescatter", value, name, reduction=reduction_of(op))


def _run(kind: Kind, value: Any, name: str | None, **options: Any) -> Any:
    title = f"hvd.{kind}"
    _check_options(title, name=name, **options)
    array = _array_of(value, title)
    sent = as_torch(array, title)
    own = operation_names.name(kind, name, global_process_set)
    number = set_number(global_process_set, kind.capitalize())
    result = wait(begin([Request(own, kind, sent, process_set=number, **options)]))[0]
    if _is_tensorflow(value):
        return sys.modules["tensorflow"].convert_to_tensor(as_array(result, array.dtype))
    import keras

    return result if backend_name() == "torch" else keras.ops.convert_to_tensor(as_array(result, array.dtype))


def _check_options(
    title: str, *, name: Any, root: Any = 0, prescale: Any = 1, postscale: Any = 1, **_: Any
) -> None:
    """Raise ValueError for arguments that no rank can mean."""
    expected = (
        ("name", name, name is None or isinstance(name, str), "a text, the same on all ranks, or None"),
        ("root_rank", root, isinstance(root, Integral) and not isinstance(root, bool), "the number of a rank"),
        ("prescale_factor", prescale, isinstance(prescale, Real), "a number"),
        ("postscale_factor", postscale, isinstance(postscale, Real), "a number"),
    )
    for argument, value, is_good, what in expected:
        if not is_good:
            raise ValueError(f"{title}: {argument}={value!r:.80}: expected {what}")


def _is_tensorflow(value: Any) -> bool:
    """Return whether a value is of TensorFlow: results are too, whatever Keras runs on."""
    return any(each.__module__.partition(".")[0] == "tensorflow" for each in type(value).__mro__)


def _array_of(value: Any, title: str) -> np.ndarray[Any, Any]:
    """Return a value as an array; raise ValueError, with a remedy, for what has no values to send."""
    kind = type(value).__name__
    if kind in ("RaggedTensor", "SparseTensor", "IndexedSlices"):
        raise ValueError(
            f"{title}: a {kind} cannot travel; give a dense tensor, for example by tf.convert_to_tensor"
        )
    if kind == "KerasTensor":
        raise ValueError(
            f"{title}: a symbolic tensor of Keras has no values to exchange; give what a model returns"
        )
    try:
        if _is_tensorflow(value):
            return np.asarray(value.numpy())
        if not hasattr(value, "shape"):
            return np.asarray(value)
        import keras

        return np.asarray(keras.ops.convert_to_numpy(value))
    except Exception as problem:  # each framework has its own
        raise ValueError(
            f"{title}: {value!r:.80} has no values to exchange ({problem!s:.120}); expected a tensor, an array, "
            f"or numbers in lists of equal lengths, outside graphs: inside of them call {title} of "
            "farandole.horovod.tensorflow"
        ) from problem


def load(filepath: Any, custom_objects: Any, compression: Any, keras: Any) -> Any:
    """Return a saved model of `keras`, a module, whose optimizer is distributed."""
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = make_optimizer(
            model.optimizer, None, compression, Average, predivide_factor=1.0, groups=None
        )
    return model


# What our callbacks see of a `fit`, told to the watch of steps: batches, epochs, evaluations, losses.
#
# Every callback of ours tells it, so a script has to add none for it; what a second one tells is known already.


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

"""The functions that `horovod.keras` and `horovod.tensorflow.keras` have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, cast

import numpy as np

from ....comm.named_ops.operations import Kind, Request
from ...common.compression import CodecCompressor, check_compression, name_of
from ...common.operations import begin, operation_names, set_number, wait
from ...common.process_sets import global_process_set
from ...common.reductions import (
    Average,
    check_sum_or_average,
    handle_average_backwards_compatibility,
    reduction_of,
)
from ...exchange.arrays import as_array, as_torch
from ...exchange.names import next_name
from ...exchange.settings import local_variables, make_settings
from .backends import backend_name
from .callbacks import BroadcastVariables, LearningRateSchedule, LearningRateWarmup, MetricAverage
from .observed import ObservedFit
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

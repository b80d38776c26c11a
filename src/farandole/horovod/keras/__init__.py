"""Horovod's names for Keras 3, on TensorFlow or torch: whatever `keras.backend.backend()` is.

::

    import farandole.horovod.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

and ``farandole run -np 2 -- python train.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

from .. import __version__
from ..common import names
from ..common.compression import CompressionNames
from ..common.names import *  # noqa: F403 - what every front end has
from ..common.process_sets import ProcessSet, global_process_set
from ..common.reductions import Average
from . import callbacks
from .layer.backends import backend_name
from .layer.front_end import (
    allgather_value,
    allreduce_value,
    broadcast_value,
    keep_layers_local,
    load,
    make_optimizer,
    reducescatter_value,
)
from .sync_batch_norm import sync_batch_normalization


def _compression() -> type[CompressionNames]:
    """Return the compressors of the backend: casts are its own."""
    if backend_name() == "tensorflow":
        from ..tensorflow.compression import Compression as OfTensorFlow

        return OfTensorFlow
    from ..torch.compression import Compression as OfTorch

    return OfTorch


Compression = _compression()


def DistributedOptimizer(  # noqa: N802 - the name and the arguments that scripts know
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """Return a Keras optimizer like `optimizer` that steps with the gradients of all ranks.

    Args:
        optimizer: of Keras 3, or of tf_keras.
        name: the same on all ranks; by default that of its class.
        device_dense: ignored; Horovod has this argument.
        device_sparse: ignored, as before.
        compression: one of `Compression`, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: whether sparse gradients are converted to dense ones before the exchange.
        gradient_predivide_factor: with Average, divides by this factor before and by size / factor after the sum.
        op: Average or Sum.
        num_groups: deprecated spelling of `groups` as a number.
        groups: variables that are exchanged as one operation, or the number of such groups.

    Returns:
        An optimizer of a subclass of the same name.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: an optimizer or a backend that is not supported yet.
    """
    return make_optimizer(
        optimizer,
        name,
        compression,
        op,
        predivide_factor=gradient_predivide_factor,
        groups=groups,
        num_groups=num_groups,
        sparse_as_dense=sparse_as_dense,
    )


def PartialDistributedOptimizer(  # noqa: N802 - the name and the arguments that scripts know
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedOptimizer` that keeps the gradients of `local_layers` on this rank.

    Args:
        optimizer: as for `DistributedOptimizer`.
        name: the same.
        device_dense: the same.
        device_sparse: the same.
        compression: the same.
        sparse_as_dense: the same.
        gradient_predivide_factor: the same.
        op: the same.
        backward_passes_per_step: passes whose gradients are added up before the exchange.
        average_aggregated_gradients: whether the sum of the passes is divided by their number.
        groups: the same.
        process_set: the ranks that take part.
        local_layers: a built layer, or several.
        scale_local_gradients: whether the gradients of `local_layers` are divided by the number of ranks.

    Raises:
        ValueError: an argument is invalid.
    """
    made = make_optimizer(
        optimizer,
        name,
        compression,
        op,
        predivide_factor=gradient_predivide_factor,
        groups=groups,
        passes=backward_passes_per_step,
        averages_passes=average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return keep_layers_local(made, local_layers)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Keras 3 has no global variables."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. Please use "
        "`hvd.callbacks.BroadcastGlobalVariablesCallback` instead."
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of a tensor-like value over all ranks, outside graphs.

    Args:
        value: the same shape and type on all ranks.
        name: the same on all ranks; by default a counter makes one.
        average: Horovod's old spelling of `op`: True, the default, is Average, False is Sum.
        prescale_factor: multiplied before the reduction.
        postscale_factor: multiplied after the reduction.
        op: Average, Sum, Min, Max, Product or Adasum.
        compression: none or a codec of `Compression`.
    """
    return allreduce_value(value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the rows of all ranks' tensor-like values, concatenated in rank order.

    Args:
        value: shape (rows, ...); the number of rows may differ between ranks.
        name: the same on all ranks; by default a counter makes one.
    """
    return allgather_value(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the tensor-like value of rank `root_rank`.

    Args:
        value: the same shape and type on all ranks.
        root_rank: the rank whose value is sent.
        name: the same on all ranks; by default a counter makes one.
    """
    return broadcast_value(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Return this rank's rows of the reduction of all ranks' tensor-like values.

    Args:
        value: shape (rows, ...), the same on all ranks.
        name: the same on all ranks; by default a counter makes one.
        op: Average or Sum.
    """
    return reducescatter_value(value, name, op)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model whose optimizer, with its state, is distributed.

    Args:
        filepath: what ``model.save`` wrote.
        custom_optimizers: ignored: what is saved is the plain optimizer, whatever it is.
        custom_objects: as for ``keras.models.load_model``.
        compression: as for `DistributedOptimizer`.
        legacy_opts: ignored; Horovod has this argument.
    """
    return load(filepath, custom_objects, compression, importlib.import_module("keras"))


def __getattr__(name: str) -> Any:
    if name == "elastic":  # loaded when first used
        return importlib.import_module("farandole.horovod.keras.elastic")
    if name == "SyncBatchNormalization":
        return sync_batch_normalization()
    raise AttributeError(f"module 'farandole.horovod.keras' has no attribute {name!r}")


__all__ = [
    "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "__version__", "allgather",
    "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "load_model", "reducescatter",
]  # fmt: skip
__all__ += names.__all__

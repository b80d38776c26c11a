"""Horovod's names for `tf.keras`.

::

    import farandole.horovod.tensorflow.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size())), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

`tf.keras` is Keras 3 on TensorFlow; with TF_USE_LEGACY_KERAS=1 it is tf_keras, of Keras 2.
"""

from __future__ import annotations

import importlib
from typing import Any

from ... import __version__
from ...common import names
from ...common.names import *  # noqa: F403 - what every front end has
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average
from ...keras import (
    PartialDistributedOptimizer,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from ...keras.layer.front_end import load, make_optimizer
from ..compression import Compression
from . import callbacks, which


def DistributedOptimizer(  # noqa: N802 - the name and the arguments that scripts know
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
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a Keras optimizer like `optimizer` that steps with the gradients of all ranks of `process_set`.

    Args:
        optimizer: of Keras 3, or of tf_keras.
        name: the same on all ranks; by default that of its class.
        device_dense: ignored; Horovod has this argument.
        device_sparse: ignored, as before.
        compression: one of `Compression`, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: whether sparse gradients are converted to dense ones before the exchange.
        gradient_predivide_factor: with Average, divides by this factor before and by size / factor after the sum.
        op: Average or Sum.
        backward_passes_per_step: passes whose gradients are added up before the exchange.
        average_aggregated_gradients: whether the sum of the passes is divided by their number.
        num_groups: deprecated spelling of `groups` as a number.
        groups: variables that are exchanged as one operation, or the number of such groups.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Returns:
        An optimizer of a subclass of the same name.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: an optimizer or an argument that is not supported yet.
    """
    return make_optimizer(
        optimizer,
        name,
        compression,
        op,
        predivide_factor=gradient_predivide_factor,
        groups=groups,
        num_groups=num_groups,
        passes=backward_passes_per_step,
        averages_passes=average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model of `tf.keras` whose optimizer, with its state, is distributed.

    Args:
        filepath: what ``model.save`` wrote.
        custom_optimizers: ignored: what is saved is the plain optimizer, whatever it is.
        custom_objects: as for ``tf.keras.models.load_model``.
        compression: as for `DistributedOptimizer`.
        legacy_opts: ignored; Horovod has this argument.
    """
    return load(filepath, custom_objects, compression, which.keras)


def __getattr__(name: str) -> Any:
    if name == "elastic":  # loaded when first used
        return importlib.import_module("farandole.horovod.tensorflow.keras.elastic")
    raise AttributeError(f"module 'farandole.horovod.tensorflow.keras' has no attribute {name!r}")


__all__ = [
    "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "__version__", "allgather",
    "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "load_model", "reducescatter",
]  # fmt: skip
__all__ += names.__all__

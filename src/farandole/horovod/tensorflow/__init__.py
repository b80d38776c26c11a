"""Horovod's names for TensorFlow.

::

    import farandole.horovod.tensorflow as hvd

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    hvd.broadcast_variables(variables, root_rank=0)

and ``farandole run -np 2 -- python train.py``. For Keras: `farandole.horovod.tensorflow.keras`.
"""

from __future__ import annotations

import importlib
from typing import Any

from .. import __version__
from . import mpi_ops, util
from .functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from .mpi_ops import *  # noqa: F403 - all operations and questions, as that module lists them
from .optimizer import DistributedGradientTape, DistributedOptimizer, PartialDistributedGradientTape
from .util import refs_to_vars, vars_to_refs


def __getattr__(name: str) -> Any:
    if name in ("elastic", "keras"):  # loaded when first used: a script may do without
        return importlib.import_module(f"farandole.horovod.tensorflow.{name}")
    if name == "callbacks":  # Horovod has them in horovod.tensorflow.keras, and guides look for them here too
        return __getattr__("keras").callbacks
    if name == "SyncBatchNormalization":  # it needs Keras
        from .sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module 'farandole.horovod.tensorflow' has no attribute {name!r}")


__all__ = [
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "__version__",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "refs_to_vars",
    "util",
    "vars_to_refs",
]
__all__ += list(mpi_ops.__all__)

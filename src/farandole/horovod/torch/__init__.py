"""Horovod's names for PyTorch.

::

    import farandole.horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    loss = hvd.allreduce(loss, name="loss")

and ``farandole run -np 4 -- python train.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from ...comm.device.accelerator import gpu_count
from .. import __version__
from ..common.exceptions import HorovodMismatchError, HorovodPeerLostError, HorovodStalledError
from ..common.util import check_extension
from . import mpi_ops
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .mpi_ops import *  # noqa: F403 - all operations and questions, as that module lists them
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm


def _check_has_gpu() -> bool:
    return gpu_count() > 0


def __getattr__(name: str) -> Any:
    if name == "elastic":  # loaded when first used: a job that is not elastic starts nothing of it
        return importlib.import_module("farandole.horovod.torch.elastic")
    raise AttributeError(f"module 'farandole.horovod.torch' has no attribute {name!r}")


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "HorovodMismatchError",
    "HorovodPeerLostError",
    "HorovodStalledError",
    "SyncBatchNorm",
    "__version__",
    "_check_has_gpu",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_extension",
]
__all__ += list(mpi_ops.NAMES_OF_HVD)

"""All operations and questions under the name that programs import them from, `horovod.torch.mpi_ops`.

Scripts import more from here than `horovod.torch` has.
"""

from __future__ import annotations

from ..common import names
from ..common.basics import basics
from ..common.exceptions import HorovodInternalError
from ..common.names import *  # noqa: F403 - what every front end has
from ..common.reductions import handle_average_backwards_compatibility
from ..common.util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
from .compression import Compression
from .ops.allreduce import (
    HorovodAllreduce,
    HorovodBroadcast,
    HorovodGroupedAllreduce,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from .ops.gather_scatter import (
    HorovodAllgather,
    HorovodAlltoall,
    HorovodGroupedAllgather,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from .ops.handles import handles, poll, synchronize
from .optim.joining import barrier, join

_basics = basics
_handle_map = handles.pending

__all__ = [
    "HorovodInternalError", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async",
    "sparse_allreduce_async", "synchronize",
]  # fmt: skip
__all__ += names.__all__
NAMES_OF_HVD = tuple(__all__)
"""What `farandole.horovod.torch` shows of these; the rest is what scripts import from here."""
__all__ += [
    "Compression",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "_basics",
    "_handle_map",
    "check_installed_version",
    "get_average_backwards_compatibility_fun",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "num_rank_is_power_2",
]

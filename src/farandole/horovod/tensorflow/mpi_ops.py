"""All operations and questions under the name that programs import them from, `horovod.tensorflow.mpi_ops`."""

from __future__ import annotations

from typing import Any

from ..common.basics import basics
from ..common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ..common.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    handle_average_backwards_compatibility,
)
from ..common.util import check_extension, gpu_available, num_rank_is_power_2, split_list
from .calls.scalars import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from .compression import Compression
from .ops.allreduce import allreduce, broadcast, broadcast_, grouped_allreduce, join
from .ops.gather_scatter import allgather, alltoall, grouped_allgather, grouped_reducescatter, reducescatter

_basics = basics
check_num_rank_power_of_2 = num_rank_is_power_2
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built


def init(*args: Any, **kwargs: Any) -> None:
    """Join the job. The arguments are `comm` and `process_sets`.

    Args:
        args: as for `HorovodBasics.init`.
        kwargs: ``comm`` must contain all ranks; ``process_sets`` is a list of `ProcessSet`, the same on all ranks,
            or "dynamic".
    """
    _basics.init(*args, **kwargs)


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Leave the job; `init` may follow.

    Args:
        args: as for `HorovodBasics.shutdown`.
        kwargs: the same.
    """
    _basics.shutdown(*args, **kwargs)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "_basics",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
]

"""Names that every front end has: `init`, the questions a rank may ask, sets of ranks, reductions."""

from __future__ import annotations

from typing import Any

from .basics import basics
from .process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from .reductions import Adasum, Average, Max, Min, Product, Sum

is_initialized, rank, size = basics.is_initialized, basics.rank, basics.size
local_rank, local_size = basics.local_rank, basics.local_size
cross_rank, cross_size = basics.cross_rank, basics.cross_size
is_homogeneous = basics.is_homogeneous
start_timeline, stop_timeline = basics.start_timeline, basics.stop_timeline
mpi_threads_supported = basics.mpi_threads_supported
mpi_enabled, mpi_built = basics.mpi_enabled, basics.mpi_built
gloo_enabled, gloo_built = basics.gloo_enabled, basics.gloo_built
nccl_built, ddl_built, ccl_built = basics.nccl_built, basics.ddl_built, basics.ccl_built
cuda_built, rocm_built = basics.cuda_built, basics.rocm_built


def init(*args: Any, **kwargs: Any) -> None:
    """Join the job. The arguments are `comm` and `process_sets`.

    Args:
        args: as for `HorovodBasics.init`.
        kwargs: ``comm`` must contain all ranks; ``process_sets`` is a list of `ProcessSet`, the same on all ranks,
            or "dynamic".
    """
    basics.init(*args, **kwargs)


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Leave the job; `init` may follow.

    Args:
        args: as for `HorovodBasics.shutdown`.
        kwargs: the same.
    """
    basics.shutdown(*args, **kwargs)


__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "init", "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built", "shutdown", "size",
    "start_timeline", "stop_timeline",
]  # fmt: skip

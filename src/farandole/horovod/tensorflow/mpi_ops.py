"""All operations and questions under the name that programs import them from, `horovod.tensorflow.mpi_ops`."""

from __future__ import annotations

from ..common import names
from ..common.basics import basics
from ..common.names import *  # noqa: F403 - what every front end has
from ..common.reductions import handle_average_backwards_compatibility
from ..common.util import check_extension, gpu_available, num_rank_is_power_2, split_list
from .compression import Compression
from .ops.allreduce import allreduce, broadcast, broadcast_, grouped_allreduce, join
from .ops.call import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from .ops.gather_scatter import allgather, alltoall, grouped_allgather, grouped_reducescatter, reducescatter

_basics = basics
check_num_rank_power_of_2 = num_rank_is_power_2

__all__ = [
    "Compression", "_basics", "allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "check_extension",
    "check_num_rank_power_of_2", "gpu_available", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "handle_average_backwards_compatibility", "join", "local_rank_op", "local_size_op",
    "process_set_included_op", "rank_op", "reducescatter", "size_op", "split_list",
]  # fmt: skip
__all__ += names.__all__

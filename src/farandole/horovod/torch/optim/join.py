"""Where ranks wait for each other: join at the end of uneven data, and barriers."""

from __future__ import annotations

from ....comm.named_ops.operations import Request
from ....core.vocabulary.errors import CommError, ConfigError
from ...common.basics import basics
from ...common.exceptions import from_comm_error
from ...common.operations import operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ..ops.handles import handles, synchronize
from .joining import Joining


def join(device: int = -1) -> int:
    """Mark this rank as out of data, and wait until all ranks have joined.

    Until then this rank contributes zeros to the allreduces of the others, whose Average still divides by the
    number of all ranks. Other operations raise an error on the other ranks meanwhile.

    Args:
        device: ignored; Horovod has this argument.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: a plan or a state that `join` does not support.
        HorovodInternalError: a rank is gone.
    """
    try:
        ticket = basics.running.engine.join()
        Joining(ticket).serve()  # gradients in buckets; the engine answers operations with names by itself
        last: int = ticket.wait()
    except ConfigError as problem:
        raise ValueError(str(problem)) from problem
    except CommError as problem:
        raise from_comm_error(problem) from problem
    operation_names.all_joined()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of `process_set` have called it. Operations in flight continue."""
    number = set_number(process_set, "Barrier")
    request = Request(operation_names.name("barrier", None, process_set), "barrier", process_set=number)
    synchronize(handles.submit([request], lambda results: None))

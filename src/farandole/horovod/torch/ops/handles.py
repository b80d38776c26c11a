"""Handles: every operation of this front end submits a request, returns a handle, and gets a result by it.

A handle is an int, as in Horovod. What this rank alone can see is wrong is a ValueError at once, everything else a
`HorovodInternalError` on all ranks in `synchronize`.

[Note: a name is taken until it is waited for] A small operation is complete when `submit` returns on the rank that
comes last, and on no other. So whether a name is in flight differs between ranks, and a second operation of the
name would be refused on some and wait for ever on the others. Here a name is taken until its handle was
synchronized, or `poll` said that it is done: that is the same on all ranks of one script.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...common.basics import basics
from ...common.exceptions import HorovodUnsupportedError
from ...common.operations import begin, wait
from ...common.reductions import reduction_of
from ...named_ops.matcher import DUPLICATE
from ...named_ops.operations import DTYPE_NAMES, Request, Ticket
from ...named_ops.reductions import refuse_reduction

# Which tensors an operation takes.


def check_movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be sent, without its history; raise ValueError for one that cannot."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor.detach()


def check_reducible(tensor: torch.Tensor, op: int) -> torch.Tensor:
    """Return a tensor that can be reduced with `op`, without its history; raise ValueError else."""
    sent = check_movable(tensor)
    reason = refuse_reduction(tensor.dtype, reduction_of(op))
    if reason:
        raise ValueError(f"Tensor type {tensor.type()} is not supported. ({reduction_of(op)}: {reason})")
    return sent


def check_list(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the members of a group; raise ValueError for none."""
    found = list(tensors)
    if not found:
        raise ValueError("a grouped operation needs at least one tensor")
    if len({tensor.device for tensor in found}) > 1:
        raise HorovodUnsupportedError(
            f"Tensors in list must be on same device. (got {sorted({str(tensor.device) for tensor in found})})"
        )
    return found


Finish = Callable[[list[Any]], Any]
"""Makes what `synchronize` returns out of the results of the requests, in their order."""


class Pending(NamedTuple):
    """What one handle stands for."""

    tickets: list[Ticket]
    finish: Finish
    names: list[tuple[int, str]]
    """Process set and name of each request."""


@dataclass
class Handles:
    """All handles of this process that `synchronize` has not cleared."""

    pending: dict[int, Pending] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _taken_names: dict[tuple[int, str], int] = field(default_factory=dict)
    """Handles by name. See [Note: a name is taken until it is waited for]."""

    def clear(self) -> None:
        """Forget everything: the job is over."""
        self.pending.clear()
        self._taken_names.clear()
        self._numbers = itertools.count()

    def submit(self, requests: Sequence[Request], finish: Finish) -> int:
        """Begin `requests`, several as a group, and return the handle."""
        names = [(request.process_set, request.name) for request in requests]
        for name in names:
            if name in self._taken_names:
                raise ValueError(f"{DUPLICATE} ({name[1]}: its handle has not been synchronized)")
        tickets = begin(requests)
        handle = next(self._numbers)
        self.pending[handle] = Pending(tickets, finish, names)
        self._taken_names.update(dict.fromkeys(names, handle))
        return handle

    def free_names(self, handle: int, pending: Pending) -> None:
        """Let others have the names of an operation that was waited for."""
        for name in pending.names:
            if self._taken_names.get(name) == handle:
                del self._taken_names[name]


handles = Handles()
basics.call_on_shutdown(handles.clear)


def poll(handle: int) -> bool:
    """Return whether the operation of `handle` has ended, so that `synchronize` would not wait.

    Raises:
        ValueError: the handle does not exist or was synchronized.
    """
    pending = handles.pending.get(handle)
    if pending is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    done = all(ticket.done() for ticket in pending.tickets)
    if done:
        handles.free_names(handle, pending)
    return done


def synchronize(handle: int) -> Any:
    """Wait for the operation of `handle` and return its output.

    Returns:
        The output of the operation; None for a handle that does not exist any more.

    Raises:
        HorovodInternalError: the operation failed: `HorovodMismatchError` if the ranks' requests differ,
            `HorovodPeerLostError` if another rank is gone.
    """
    pending = handles.pending.pop(handle, None)
    if pending is None:
        return None
    handles.free_names(handle, pending)
    return pending.finish(wait(pending.tickets))


def wait_for_all(waits: Iterable[Callable[[], Any]]) -> list[Any]:
    """Call every one of `waits`; return what they did, or raise the first error when all are over.

    So nothing is in flight, and no name is taken, when a caller goes on after an error.
    """
    results: list[Any] = []
    problem: RuntimeError | None = None
    for each in waits:
        try:
            results.append(each())
        except RuntimeError as first:
            problem = problem or first
    if problem is not None:
        raise problem
    return results

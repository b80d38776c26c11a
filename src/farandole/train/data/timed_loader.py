"""One loader that times its own iteration, for `fd.record`: it becomes an object of a subclass of its class.

An object that cannot (of a class in C, or one whose ``__class__`` is a property, as those of Accelerate) is left
alone, and says so.
"""

from __future__ import annotations

import copyreg
import time
from collections.abc import Iterator
from typing import Any

import torch

from ...comm.world.world import has_world, world
from ...core.vocabulary.events import DataWait
from ...parallel.instrument.training_facts import note_loader
from .ahead.told_later import depth_ahead, drawn_ahead
from .loader_watch import leave_out, samples_of
from .worker_cores import on_worker_cores, worker_cores

_HEAP_TYPE = 1 << 9
"""A class made by Python code: its objects may change to a subclass of it."""


def time_iteration(loader: Any) -> bool:
    """Make this one object time its iteration; return whether it could."""
    kind = type(loader)
    if getattr(kind, "_times_iteration", False):
        return True
    if not (kind.__flags__ & _HEAP_TYPE and hasattr(kind, "__iter__")):
        return False

    def iterate(self: Any) -> Iterator[Any]:
        if has_world():
            note_loader(world(), self, len(worker_cores()) or None, depth_ahead())
        with on_worker_cores():
            iterator = kind.__iter__(self)
        leave_out(iterator)
        while True:
            begin, cpu = time.monotonic(), time.thread_time()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if drawn_ahead() is None and has_world() and torch.is_grad_enabled():  # else `fd.prefetch` does it
                used = time.thread_time() - cpu
                world().session.recorder.record(DataWait(begin, time.monotonic(), samples_of(batch), used))
            yield batch

    members = {
        "__iter__": iterate,
        "_times_iteration": True,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": lambda self, protocol: _reduce_plain(self, kind, protocol),
    }
    try:
        loader.__class__ = type(kind.__name__, (kind,), members)
    except (AttributeError, TypeError):  # no setter; another layout, such as __slots__
        return False
    return type(loader) is not kind


def _reduce_plain(loader: Any, kind: type, protocol: int) -> Any:
    """Save the loader as one of its plain class: the subclass is known to this process alone."""
    reduce_ex: Any = kind.__reduce_ex__
    reduced = reduce_ex(loader, protocol)
    if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    return (_new, (kind, *reduced[1][1:]), *reduced[2:])


def _new(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)

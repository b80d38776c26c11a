"""The wait for batches of data loaders: of one that `fd.record` is given, or of all, for scripts of Horovod.

[Note: every loader of the process] Of the loaders of a process `fd.shard` and `fd.record` time the one they are
given. A script that uses Horovod's names gives none, and its `for` loop holds the iterator out of
reach. So, while such a training is recorded, the method by which torch's loaders hand out batches notes the time:
of all loaders, in the thread that trains, while gradients are on. It hands out the same batches, and is put
back as it was when the world closes.

[Note: one batch ahead] Accelerate's loaders, and so those of a Trainer, draw a batch before they hand out the one
before it. Its samples are counted with the next wait, in the step that trains on them.

[Note: one loader] That which `fd.record` is given becomes an object of a subclass of its class. An object that
cannot (of a class in C, or one whose ``__class__`` is a property, as those of Accelerate) is left alone.
"""

from __future__ import annotations

import copyreg
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

from ...comm.world.world import World, has_world, world
from ...core.vocabulary.events import DataWait, NullRecorder
from ...parallel.instrument.training_facts import note_loader, note_workers
from .told_later import depth_ahead, drawn_ahead
from .worker_cores import on_worker_cores, worker_cores

_KIND = dataloader._BaseDataLoaderIter
_TIMED = "_farandole_times_it"
_DRAWN = "_farandole_drawn"
_AHEAD = "accelerate.data_loader"
"""The module whose loaders do. See [Note: one batch ahead]."""


def watch_loaders(here: World) -> None:
    """Record the wait for batches of torch's loaders until `here` closes, where anything is recorded."""
    if not isinstance(here.session.recorder, NullRecorder):
        here.session.keep(_LoaderWatch, partial(_LoaderWatch, here))


def leave_out(iterator: Any) -> None:
    """Leave the waits for `iterator` to the caller, who records them."""
    with suppress(AttributeError):  # one of another kind, which is not watched
        setattr(iterator, _TIMED, True)


def pause_loaders(here: World, *, is_paused: bool) -> None:
    """Record no waits while an evaluation goes on that leaves gradients on."""
    watch = here.session.kept(_LoaderWatch)
    if watch is not None:
        watch.is_paused = is_paused


class _LoaderWatch:
    """One replacement of the method, from now until `stop`."""

    def __init__(self, here: World) -> None:
        here.session.call_on_close(self.stop)
        self.is_paused = False
        self._thread = threading.get_ident()
        original = self._original = _KIND.__next__

        def next_batch(iterator: Any) -> Any:
            is_left_out = getattr(iterator, _TIMED, False) or drawn_ahead() is not None
            if self.is_paused or is_left_out or threading.get_ident() != self._thread:
                return original(iterator)
            return _draw(iterator, original, sys._getframe(1), vars(iterator))

        self._mine = next_batch
        _KIND.__next__ = next_batch  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Put the method back, unless other code has replaced ours meanwhile."""
        if _KIND.__next__ is self._mine:
            _KIND.__next__ = self._original  # type: ignore[method-assign]


def _draw(
    iterator: Any, draw: Callable[[Any], Any], caller: FrameType, kept: dict[str, Any], *, is_counted: bool = True
) -> Any:
    """Draw a batch and record the wait, unless `fd.prefetch` does. `kept`: see [Note: one batch ahead]."""
    begin, cpu = time.monotonic(), time.thread_time()
    batch, is_drawn = None, False
    if getattr(iterator, "_num_yielded", 1) == 0:
        kept.pop(_DRAWN, None)  # of an epoch that was left in its midst
    try:
        batch, is_drawn = draw(iterator), True
        return batch
    finally:
        samples = samples_of(batch)
        if caller.f_globals.get("__name__") == _AHEAD:  # the last batch is trained on when there are no more
            samples, kept[_DRAWN] = kept.get(_DRAWN, 0), samples
        if is_counted and (is_drawn or samples) and has_world() and torch.is_grad_enabled():
            used = time.thread_time() - cpu
            if hasattr(iterator, "_num_workers"):
                note_workers(world(), iterator._num_workers)
            world().session.recorder.record(DataWait(begin, time.monotonic(), samples, used))


def samples_of(batch: Any) -> int:
    """Return how many samples are in a batch: the first dimension of its first tensor; 0: not known."""
    for _ in range(4):
        if isinstance(batch, torch.Tensor):
            return batch.shape[0] if batch.dim() else 0
        if isinstance(batch, dict):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, (tuple, list)) and batch:
            batch = batch[0]
        else:
            return 0
    return 0


_HEAP_TYPE = 1 << 9
"""A class made by Python code: its objects may change to a subclass of it."""


def time_iteration(loader: Any) -> bool:
    """Make this one object time its iteration; return whether it could. See [Note: one loader]."""
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
        kept: dict[str, Any] = {}
        while True:
            try:
                batch = _draw(iterator, next, sys._getframe(1), kept, is_counted=drawn_ahead() is None)
            except StopIteration:
                return
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

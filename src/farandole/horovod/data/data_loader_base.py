"""A loader that a thread of its own runs ahead of the training loop.

::

    class Loader(AsyncDataLoaderMixin, MyLoader):      # the mixin first
        ...

    loader = Loader(async_loader_queue_size=8, path="data")
    for batch in loader: ...
    loader.close_async_loader()

[Note: one thread, epoch after epoch] The thread goes on with the next epoch while the loop still computes
the last batches of this one; the end of an epoch travels through the queue as a mark. An error of the loader
is raised in the loop, at the place of the batch that it would have given, and ends the thread; the next loop
over the loader begins anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

_LOOK_SECONDS = 0.1
"""How often a thread that waits looks whether the loader was closed."""


class BaseDataLoader:
    """What a loader has: `_iterate` gives the batches of an epoch, `_process_batch` finishes one of them."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many batches it has")

    def _iterate(self) -> Iterator[Any]:
        """Give the batches of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no _iterate")

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch as the training loop gets it; runs in the loop's thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class _EndOfEpoch:
    """In the queue behind an epoch's last batch."""


@dataclass(frozen=True)
class _Failed:
    """Put into the queue instead of a batch."""

    error: Exception


class AsyncDataLoaderMixin:
    """Makes the loader behind it in the order of classes run in a thread.

    `async_loader_queue_size` batches wait at most; 0: no thread. The other arguments go to the loader.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(f"async_loader_queue_size={async_loader_queue_size}: expected at least 0 (no thread)")
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._stopped = Event()
        self._queue: Queue[Any] = Queue(async_loader_queue_size)
        self._thread: Thread | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread; batches that wait are dropped. May be called twice; a new loop starts it again."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._say("closing")
        self._stopped.set()
        thread.join()

    def __iter__(self) -> Iterator[Any]:
        if not self.async_loader_queue_size:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        self._start()
        while True:
            batch = self._next()
            if isinstance(batch, _EndOfEpoch):
                return
            if isinstance(batch, _Failed):
                self.close_async_loader()
                raise batch.error
            yield self._process_batch(batch)

    def _iterate(self) -> Iterator[Any]:
        batches: Iterator[Any] = super()._iterate()  # type: ignore[misc]
        return batches

    def _process_batch(self, batch: Any) -> Any:
        return super()._process_batch(batch)  # type: ignore[misc]

    def _start(self) -> None:
        if self._thread is None:
            self._stopped, self._queue = Event(), Queue(self.async_loader_queue_size)
            self._thread = Thread(
                target=self._load, args=(self._queue, self._stopped), name="async-data-loader", daemon=True
            )
            self._say("starting")
            self._thread.start()

    def _next(self) -> Any:
        queue, stopped = self._queue, self._stopped
        while not stopped.is_set():
            try:
                return queue.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue
        return _EndOfEpoch()  # closed inside the loop

    def _load(self, queue: Queue[Any], stopped: Event) -> None:
        try:
            while not stopped.is_set():
                for batch in self._iterate():
                    if not _put(queue, batch, stopped):
                        return
                _put(queue, _EndOfEpoch(), stopped)
        except Exception as error:  # raised in the loop instead
            _put(queue, _Failed(error), stopped)

    def _say(self, what: str) -> None:
        if self.debug_data_loader:
            sys.stderr.write(
                f"{type(self).__name__}: {what} the thread, {self.async_loader_queue_size} batches ahead\n"
            )


def _put(queue: Queue[Any], item: Any, stopped: Event) -> bool:
    """Put `item` when there is room; return False when the loader was closed meanwhile."""
    while not stopped.is_set():
        try:
            queue.put(item, timeout=_LOOK_SECONDS)
        except Full:
            continue
        return True
    return False

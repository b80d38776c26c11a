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
from typing import Any

from ...train.data.ahead_thread import AheadThread


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


_END_OF_EPOCH = object()
"""Behind an epoch's last batch."""


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
        self._thread: AheadThread[Any] | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread; batches that wait are dropped. May be called twice; a new loop starts it again."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._say("closing")
        thread.close()

    def __iter__(self) -> Iterator[Any]:
        if not self.async_loader_queue_size:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        thread = self._start()
        while True:
            try:
                batch = thread.take()
            except StopIteration:  # closed inside the loop
                return
            except BaseException:
                if thread.is_closed:  # else this thread was interrupted, and the loader may hang
                    self.close_async_loader()
                raise
            if batch is _END_OF_EPOCH:
                return
            yield self._process_batch(batch)

    def _iterate(self) -> Iterator[Any]:
        batches: Iterator[Any] = super()._iterate()  # type: ignore[misc]
        return batches

    def _process_batch(self, batch: Any) -> Any:
        return super()._process_batch(batch)  # type: ignore[misc]

    def _start(self) -> AheadThread[Any]:
        if self._thread is None:
            self._thread = AheadThread(
                self._epochs().__next__, self.async_loader_queue_size + 1, "async-data-loader"
            )  # one more, as the thread has one in its hand
            self._say("starting")
            self._thread.start()
        return self._thread

    def _epochs(self) -> Iterator[Any]:
        while True:
            yield from self._iterate()
            yield _END_OF_EPOCH

    def _say(self, what: str) -> None:
        if self.debug_data_loader:
            sys.stderr.write(
                f"{type(self).__name__}: {what} the thread, {self.async_loader_queue_size} batches ahead\n"
            )

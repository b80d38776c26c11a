"""What an asynchronous operation returns: it can be waited for, asked, and turned into a future.

[Note: errors in futures] Futures of torch take errors from C++ only. One whose callback raises is the way to make
one: so a future of ours is the second of two, and what its waiters meet in C++ (DDP's reducer, for one) is a
`RuntimeError` with the name and the text of our error. `wait` raises the error itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ....core.vocabulary.errors import Stalled
from .untraced import untraced


class GroupWork(dist.Work):
    """An operation of a `ProcessGroup` on its way."""

    def __init__(self, call: str, rank: int, outputs: Sequence[torch.Tensor]) -> None:
        """`rank`: this one's global rank; `outputs`: what the future's value will be."""
        super().__init__()
        self._call, self._rank = call, rank
        self._outputs = list(outputs)
        self.finish: Callable[[], object] | None = None
        """Carries the operation out, if no thread has begun to. See `call_queue`."""
        self.on_wait: Callable[[], object] = _ignore
        """Called when a user waits, or may: a wait for the future is not seen."""
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._source = -1
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None

    @untraced
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the operation is over.

        Args:
            timeout: how long to wait at most; 0: until the group's own time-out ends the operation.

        Raises:
            CommError: what stopped it; `Stalled` when `timeout` is over before.
        """
        seconds = timeout.total_seconds()
        finish = self.finish  # read once: the end of the operation, in another thread, removes it
        if seconds <= 0 and finish is not None and not self._done.is_set():
            self.on_wait()
            finish()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise Stalled(
                f"it was not over within {seconds:g} s, and goes on",
                rank=self._rank,
                operation=self._call,
                remedy="wait again, or for longer",
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether it is over, and well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what stopped it; None: nothing has."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written, when it is over."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return who sent what a receive from any rank received: a rank of the group."""
        return self._source

    _source_rank = source_rank

    @untraced
    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the written tensors. See [Note: errors in futures]."""
        self.on_wait()
        with self._lock:
            if self._futures is None:
                first: torch.futures.Future[Any] = torch.futures.Future()
                self._futures = (first, first.then(self._value))
                if self._done.is_set():
                    first.set_result(None)
            return self._futures[1]

    def end(self, error: BaseException | None = None, *, source: int = -1) -> Callable[[], object] | None:
        """Let all that wait go on; called once, by who carries the operation out.

        Returns:
            What calls the callbacks of the futures; None where there are none. See `servers`.
        """
        self._error, self._source, self.finish = error, source, None
        with self._lock:
            self._done.set()
            futures = self._futures
        return None if futures is None else partial(futures[0].set_result, None)

    def _value(self, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs


def _ignore() -> None:
    pass

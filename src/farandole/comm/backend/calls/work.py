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
from ...device.untraced import untraced


class WorkEnd:
    """Whether an operation is over, and how.

    It does not know the operation's tensors: the thread that tells of the end holds this for a moment longer, and
    who waits looks at once whether a tensor is held elsewhere (`grad_ownership`).
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.source = -1
        self.first_future: torch.futures.Future[Any] | None = None

    def tell(self, error: BaseException | None = None, *, source: int = -1) -> Callable[[], object] | None:
        """Let all that wait go on; called once, by who carries the operation out.

        Returns:
            What calls the callbacks of the futures; None where there are none. See `servers`.
        """
        self.error, self.source = error, source
        with self.lock:
            self.done.set()
            future = self.first_future
        return None if future is None else partial(future.set_result, None)


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
        self.end = WorkEnd()
        self._future: torch.futures.Future[Any] | None = None

    @untraced
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the operation is over.

        Args:
            timeout: how long to wait at most; 0: until the group's own time-out ends the operation.

        Raises:
            CommError: what stopped it; `Stalled` when `timeout` is over before.
        """
        seconds = timeout.total_seconds()
        if seconds <= 0 and self.finish is not None and not self.end.done.is_set():
            self.on_wait()
            self.finish()
        if not self.end.done.wait(seconds if seconds > 0 else None):
            raise Stalled(
                f"it was not over within {seconds:g} s, and goes on",
                rank=self._rank,
                operation=self._call,
                remedy="wait again, or for longer",
            )
        if self.end.error is not None:
            raise self.end.error
        return True

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        return self.end.done.is_set()

    def is_success(self) -> bool:
        """Return whether it is over, and well."""
        return self.end.done.is_set() and self.end.error is None

    def exception(self) -> BaseException | None:
        """Return what stopped it; None: nothing has."""
        return self.end.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written, when it is over."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return who sent what a receive from any rank received: a rank of the group."""
        return self.end.source

    _source_rank = source_rank

    @untraced
    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the written tensors. See [Note: errors in futures]."""
        self.on_wait()
        with self.end.lock:
            if self._future is None:
                first: torch.futures.Future[Any] = torch.futures.Future()
                self._future, self.end.first_future = first.then(self._value), first
                if self.end.done.is_set():
                    first.set_result(None)
            return self._future

    def _value(self, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
        if self.end.error is not None:
            raise self.end.error
        return self._outputs


def _ignore() -> None:
    pass

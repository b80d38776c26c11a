"""What happens when a batch is handed out, put off until the loop has it: for batches that a thread draws ahead.

[Note: drawn ahead, told later] A loader tells others of each batch that it hands out: the weight in the mean, the
place to resume at, the rows that are gathered, the wait that is recorded. All of it is about the batch that the
loop has. Where `fd.prefetch` draws ahead, the draw leaves it beside the batch, and the loop's thread does it when
the batch is taken: then the batch may be on another device, and the wait is the one of the loop. What is about
drawing (which samples come next, in which shares) is done at the draw.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...comm.batch_weight import tensors_in


class LoopWait(NamedTuple):
    """How long the loop waited for a batch."""

    begin_seconds: float
    """Monotonic, as `end_seconds`."""
    end_seconds: float
    cpu_seconds: float
    """CPU time of the loop's thread in it."""


class Handover:
    """How a loop gets one batch."""

    def __init__(self, begin_seconds: float, begin_cpu_seconds: float) -> None:
        """Begun at these times, monotonic and of the thread's CPU; it ends now."""
        end = time.monotonic()
        self._wait = self.whole_wait = LoopWait(begin_seconds, end, time.thread_time() - begin_cpu_seconds)
        self.copies: Mapping[int, torch.Tensor] = {}
        """What the loop gets instead of a tensor that was drawn, by the latter's identity."""

    def wait(self) -> LoopWait:
        """Return the wait, once: of several batches that are handed over as one, the first has it."""
        wait = self._wait
        self._wait = LoopWait(wait.end_seconds, wait.end_seconds, 0.0)
        return wait

    def tensors_of(self, batch: Any) -> Any:
        """Return the batch as the loop gets it, or its tensors."""
        if not self.copies:
            return batch
        return [self.copies.get(id(tensor), tensor) for tensor in tensors_in(batch)]


Tell = Callable[[Handover], None]


class DrawnAhead:
    """What the draws of one loop have put off."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.may_begin = True
        """Whether the loop's thread draws: where an epoch begins, ranks may send each other its order."""
        self.ends: list[Callable[[], None]] = []
        """To be called when the loop is left."""
        self._put_off: list[Tell] = []

    def put_off(self, tell: Tell) -> None:
        """Do this when the loop has the batch that is being drawn."""
        self._put_off.append(tell)

    def take(self) -> list[Tell]:
        """Return what was put off since the last call."""
        taken, self._put_off = self._put_off, []
        return taken


_thread = threading.local()


def drawn_ahead() -> DrawnAhead | None:
    """Return where this thread puts things off; None: it uses what it draws itself."""
    found: DrawnAhead | None = getattr(_thread, "drawn_ahead", None)
    return found


def depth_ahead() -> int | None:
    """Return how many batches are drawn ahead here; None: this thread uses what it draws itself."""
    ahead = drawn_ahead()
    return None if ahead is None else ahead.depth


@contextmanager
def drawing_for(ahead: DrawnAhead) -> Iterator[None]:
    """Let this thread put off what it is told inside."""
    before = drawn_ahead()
    _thread.drawn_ahead = ahead
    try:
        yield
    finally:
        _thread.drawn_ahead = before


def tell(what: Tell, begin_seconds: float = 0.0, begin_cpu_seconds: float = 0.0) -> None:
    """Do what is to be done when a batch is handed out: now, or when the loop has it. See `Handover`."""
    ahead = drawn_ahead()
    if ahead is None:
        what(Handover(begin_seconds, begin_cpu_seconds))
    else:
        ahead.put_off(what)

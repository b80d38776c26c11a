"""A thread that draws values for a loop, a few ahead of it. No torch: whose values they are does not matter.

::

    thread = AheadThread(iterator.__next__, depth=2, name="prefetch")
    thread.start()
    while True:
        value = thread.take()  # StopIteration behind the last one, or the error of the draw
    thread.close()

Neither side asks again and again: the loop waits for a value, the thread for a place. Its queues are those of
Python in C, which may be used where garbage is collected, within another call of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...comm.batch_weight import tensors_in

T = TypeVar("T")

_LOOK_SECONDS = 1.0
"""How often who waits for a value looks whether there is a thread that draws: a forked process has none."""


@dataclass(frozen=True, slots=True)
class DrawnValue(Generic[T]):
    """A value, or what came in its place."""

    value: T | None
    error: BaseException | None = None
    """Raised by the draw; `StopIteration` behind the last value."""


def draw_into(draw: Callable[[], T]) -> DrawnValue[T]:
    """Return what `draw` returns or raises."""
    try:
        return DrawnValue(draw())
    except BaseException as error:  # whatever it is: raised where the value is taken
        return DrawnValue(None, error)


class AheadThread(Generic[T]):
    """Calls `draw` in a thread of its own, so that at most `depth` values have been drawn and not been taken."""

    def __init__(self, draw: Callable[[], T], depth: int, name: str) -> None:
        self._draw: Callable[[], T] | None = draw
        self._depth = depth
        self._places: SimpleQueue[bool] = SimpleQueue()
        """One entry for each value that may be drawn; False: no more."""
        self._values: SimpleQueue[DrawnValue[T]] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self.has_ended = False
        """Whether the last value was drawn before the thread began."""
        self._surplus = 0
        """Values that were drawn before it began, beyond `depth`: taking them makes no place."""
        self.is_started = self.is_closed = False

    def put(self, drawn: DrawnValue[T]) -> None:
        """Add what was drawn elsewhere, before the thread begins."""
        self.has_ended = drawn.error is not None
        self._values.put(drawn)

    def start(self) -> None:
        """Begin to draw."""
        self.is_started = True
        ready = self._values.qsize()
        self._surplus = max(0, ready - self._depth)
        for _ in range(0 if self.has_ended else self._depth - ready):
            self._places.put(True)
        if self.has_ended:
            self._places.put(False)
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return self._values.empty()

    def take(self) -> T:
        """Return the next value when it is there; raise what its draw raised."""
        while not self.is_closed:
            try:
                drawn = self._values.get(timeout=_LOOK_SECONDS)
            except Empty:
                if not self._thread.is_alive() and self._values.empty() and not self.is_closed:
                    raise RuntimeError(f"the thread {self._thread.name!r} is not in this process") from None
                continue
            if drawn.error is not None:
                self.close()
                try:
                    raise drawn.error
                finally:
                    del drawn  # it has this frame in its traceback
            if self._surplus:
                self._surplus -= 1
            elif self.is_started:
                self._places.put(True)
            return drawn.value  # type: ignore[return-value] # None where the draw returned it
        raise StopIteration

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Draw no more, and wait for the thread; return whether it has ended. May be called twice."""
        self.is_closed = True
        self._places.put(False)
        return self.join(timeout_seconds)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the thread, which was closed; return whether it has ended."""
        if self._thread is current_thread():
            return False
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        self._draw = None
        return True

    def rest(self) -> list[DrawnValue[T]]:
        """Return what was drawn and not taken, in order, when the thread has ended."""
        self.close()
        rest: list[DrawnValue[T]] = []
        while not self._values.empty():
            rest.append(self._values.get())
        return rest

    def _run(self) -> None:
        draw = self._draw
        while draw is not None and self._places.get() and not self.is_closed:
            drawn = draw_into(draw)
            is_last = drawn.error is not None
            self._values.put(drawn)
            del drawn  # or the thread would keep the last value while it waits
            if is_last:
                break
        del draw


# What happens when a batch is handed out, put off until the loop has it: for batches that a thread draws ahead.
#
# [Note: drawn ahead, told later] A loader tells others of each batch that it hands out: the weight in the mean,
# the place to resume at, the rows that are gathered, the wait that is recorded. All of it is about the batch that
# the loop has. Where `fd.prefetch` draws ahead, the draw leaves it beside the batch, and the loop's thread does it
# when the batch is taken: then the batch may be on another device, and the wait is the one of the loop. What is
# about drawing (which samples come next, in which shares) is done at the draw.


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

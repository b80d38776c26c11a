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

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Generic, TypeVar

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

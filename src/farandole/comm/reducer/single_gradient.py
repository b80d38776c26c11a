"""Who counts on one gradient of each parameter between two steps, and what a second one is.

See [Note: once a step] in `engine`.
"""

from __future__ import annotations

from .options import ReducerOptions


class SingleGradientGuard:
    """Which parameters' mean has been taken since the last step. Counts nothing where nobody asks."""

    def __init__(self, manner: ReducerOptions) -> None:
        self._manner = manner
        self._spent: bytearray | None = None

    def begin_step(self) -> None:
        """Allow every parameter its next gradient."""
        self._spent = None

    def refuse_second(self, index: int, name: str) -> None:
        """Raise the front end's error where parameter `index` has had its gradient and now gets another one."""
        if self._spent is None or not self._spent[index]:
            return
        assert self._manner.too_many is not None, "somebody counts"
        problem = self._manner.too_many(name)
        if problem is not None:
            raise problem
        self._spent = None

    def were_exchanged(self, seen: bytearray, accumulate: int) -> None:
        """Note an exchange after a pass in which the parameters of `seen` became ready."""
        if self._manner.too_many is None:
            return
        if self._manner.add_up or accumulate > 1:  # a second exchange would count the first one again
            self._spent = bytearray(b"\1" * len(seen))
        elif self._spent is None:
            self._spent = seen
        else:
            self._spent = bytearray(map(max, self._spent, seen))

"""What a second gradient of a parameter between two steps is: an error, where a front end counts on one.

See [Note: one exchange a step] in `reducer`.
"""

from __future__ import annotations

from .options import ReducerOptions


class SingleGradientGuard:
    """Which parameters' mean has been taken since the last step. Counts only with `on_second_gradient`."""

    def __init__(self, options: ReducerOptions) -> None:
        self._options = options
        self.spent: bytearray | None = None
        """By parameter: 1 where another gradient is an error; None where it is for no parameter."""

    def begin_step(self) -> None:
        """Allow every parameter its next gradient."""
        self.spent = None

    def refuse_second(self, index: int, name: str) -> None:
        """Raise the front end's error where parameter `index` has had its gradient and now gets another one."""
        if self.spent is None or not self.spent[index]:
            return
        assert self._options.on_second_gradient is not None, "without it nothing is counted"
        problem = self._options.on_second_gradient(name)
        if problem is not None:
            raise problem
        self.spent = None

    def note_exchange(self, seen: bytearray, accumulate: int) -> None:
        """Note an exchange after a pass in which the parameters of `seen` became ready."""
        if self._options.reduce_op == "sum" or accumulate > 1:  # a second exchange would count the first one again
            self.spent = bytearray(b"\1" * len(seen))
        elif self.spent is None:
            self.spent = seen
        else:
            self.spent = bytearray(map(max, self.spent, seen))

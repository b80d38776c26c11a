"""What tells things apart: optimizers and tapes by name on all ranks, variables by identity on one; and failures.

[Note: made again] An elastic job begins its function again when ranks come or go. What the function makes is made
again by ranks that went on, and for the first time by new ones; what was made before it is there once on all. So
the numbers that the function has taken are given back before it begins again: see `keras.layer.elastic.run`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from ..common.basics import basics
from ..common.exceptions import HorovodInternalError

# The last error of an exchange inside a compiled step: frameworks keep its text, in an error of their own.


class Failures:
    """Which of our errors a framework's was made of."""

    def __init__(self) -> None:
        self.last: HorovodInternalError | None = None

    def note(self, problem: BaseException) -> None:
        """Remember an error that is handed to a framework."""
        if isinstance(problem, HorovodInternalError):
            self.last = problem

    def behind(self, error: BaseException) -> HorovodInternalError | None:
        """Return which of ours a framework's `error` was made of; None when it is not one of ours."""
        if isinstance(error, HorovodInternalError):
            return error
        last = self.last
        return last if last is not None and str(last) in str(error) else None


failures = Failures()
"""Those of this process."""


# The end of one generation of an elastic job and the beginning of the next, for all front ends.


def meet_again() -> None:
    """Leave the world, and join that of the ranks that are there now."""
    from ...train.session import shutdown as leave

    basics.shutdown()
    leave()  # the world too, when the program opened it before `hvd.init`
    basics.init()


class MadeObjects:
    """How many objects of each kind this process has made."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def next_name(self, kind: str) -> str:
        """Return a name for the next object of a kind, for example ``Adam.0``.

        It is the same on all ranks that make such objects in the same order.
        """
        number = self._counts[kind]
        self._counts[kind] += 1
        return f"{kind}.{number}"

    def mark(self) -> dict[str, int]:
        """Return what `go_back` takes."""
        return dict(self._counts)

    def go_back(self, marked: dict[str, int]) -> None:
        """Count as at the time of `marked`. See [Note: made again]."""
        self._counts = Counter(marked)


made_objects = MadeObjects()
"""Those of this process."""
next_name = made_objects.next_name


def key_of(variable: Any) -> int:
    """Return what tells variables apart: the same for a variable of Keras and what is inside it.

    It is not read by `value`, which may have to make something.
    """
    inner = variable._value if hasattr(variable, "_value") else getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def label_of(variable: Any) -> str:
    """Return what a reader knows a variable by. Not unique, and without what Keras counts up."""
    path = getattr(variable, "path", None)
    if isinstance(path, str):
        return path.partition("/")[2] or path
    return str(getattr(variable, "name", variable)).partition(":")[0]


def without_count(label: str) -> str:
    """Return a label without the number that Keras has counted up: ranks that made other models first differ.

    For example "dense/kernel" for "dense_3/kernel".
    """
    layer, slash, rest = label.partition("/")
    return f"{re.sub(r'_[0-9]+$', '', layer)}{slash}{rest}" if slash else label

"""Who looks at trainings by `fit`: the seam between how steps are seen and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...verify.arrays import Array


class FitObserver(Protocol):
    """Who looks at the trainings of one world."""

    @property
    def wants_batch(self) -> bool:
        """Whether the next batch is to be shown."""

    def begins(self, model: Any, calls: int) -> None:
        """A step is about to be made; or several, with ``steps_per_execution``.

        `calls`: of the same train function before.
        """

    def batch(self, model: Any, nest: Any, arrays: Sequence[Array]) -> None:
        """This is its batch: the nest, and the arrays in it. May be called by a thread of TensorFlow's."""

    def ends(self, model: Any, steps: int, logs: Any) -> None:
        """The step is done; so many, with ``steps_per_execution``."""

"""How long a step takes at a batch size: the type that the search asks, whatever predicts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """A step at one global batch."""

    global_batch: int
    """Samples, over all ranks."""
    seconds: float
    exposed_seconds: float
    """The part of `seconds` that is communication that no computation hides."""
    fits: bool = True
    """Whether it fits into the memory of a rank."""

    @property
    def exposed_share(self) -> float:
        """Share of the step that is exposed communication, 0 to 1."""
        return self.exposed_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput of all ranks."""
        return self.global_batch / self.seconds


StepTimes = Callable[[int], StepTime]
"""From a global batch, in samples, to its step."""

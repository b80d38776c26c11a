"""A figure of a cluster with its source and its interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "preset", "fitted"]


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A figure, where it comes from, and the interval that it is likely in."""

    value: float
    source: Source = "preset"
    """"measured" on this cluster, "preset": from a table, never measured here, "fitted" to runs."""
    low: float | None = None
    """Lower end of the interval; None: not known."""
    high: float | None = None

    def interval(self) -> tuple[float, float]:
        """Return both ends; an end that is not known is the value."""
        return (self.value if self.low is None else self.low), (self.value if self.high is None else self.high)

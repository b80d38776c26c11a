"""Some steps in a row by one setting, and what one setting gains over another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.step_model.prediction import Interval, nested_ratio


@dataclass(frozen=True)
class StepBlock:
    """Steps by one setting, as the slowest rank had them."""

    seconds: tuple[float, ...]
    """Duration of each step, in order; those after a switch, which make buckets, are not among them."""
    exposed_seconds: float = 0.0
    """Communication in a step that no computation hides, on the rank that waits least for the others."""
    alarm: str = ""
    """Why the setting cannot stay, whatever it gains: memory, or a rank that could not switch."""

    @property
    def median_seconds(self) -> float:
        """The step that counts."""
        return statistics.median(self.seconds)

    @property
    def exposed_share(self) -> float:
        """The most that any setting could gain, as a share of the step."""
        return min(1.0, self.exposed_seconds / self.median_seconds) if self.median_seconds > 0 else 0.0


def slowest(
    seconds_by_rank: Sequence[Sequence[float]], waits_by_rank: Sequence[float], alarm: str = ""
) -> StepBlock:
    """Return the block of the rank whose median step is longest. All ranks have as many steps, at least one."""
    worst = max(seconds_by_rank, key=statistics.median)
    return StepBlock(tuple(worst), min(waits_by_rank), alarm)


@dataclass(frozen=True)
class StepGain:
    """How much shorter steps are: a share of the step, negative where they are longer; 95 % interval."""

    share: float
    interval: Interval

    @property
    def is_certain(self) -> bool:
        """Whether the interval holds only gains."""
        return self.interval[0] > 0

    @property
    def is_loss(self) -> bool:
        """Whether the interval holds only losses."""
        return self.interval[1] < 0


def gain_of(tried: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> StepGain:
    """Return the gain of `tried` over `before`, whose steps were measured around it, round by round; seconds.

    Blocks before and after a trial, together, cancel what drifts evenly.
    """
    ratio, (low, high) = nested_ratio(tried, before)
    return StepGain(1 - ratio, (1 - high, 1 - low))

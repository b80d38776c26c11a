"""What steps really took beside what the model of a step said, by codec; so that a second choice is a better one.

[Note: learning] The model leaves things out, and leaves more out for some codecs than for others. So after a
choice the median of the measured steps over the raw prediction is kept for its main codec and route, and
multiplies what is predicted for them when ranks choose again. What was not used yet gets the mean of what is
known: else a codec would look bad only because it was tried. Only steps on a link that did not change meanwhile
teach anything: others measure the link.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.step_model.link import LinkModel

LEAST_STEPS = 5
"""Fewer teach nothing. One of five that took long, or two, do not move the median far."""
_WINDOW_STEPS = 50
_BOUNDS = (0.5, 2.0)
"""What is further off was not the model's fault."""
_SAME_LINK = 1.25
_KEPT_STEPS = 100
_SURPRISE = 1.5


@dataclass
class ChosenSteps:
    """The steps since a choice was made, beside what was predicted for them."""

    expected_seconds: float = float("inf")
    """Predicted and corrected by what was learned."""
    model_seconds: float = float("inf")
    """Predicted by the step model alone."""
    measured_seconds: list[float] = field(default_factory=list)
    """The first step after the choice, and the newest ones."""

    def add(self, seconds: float) -> None:
        """Take one more step."""
        self.measured_seconds.append(seconds)
        if len(self.measured_seconds) > 2 * _KEPT_STEPS:
            del self.measured_seconds[1:_KEPT_STEPS]

    @property
    def is_late(self) -> bool:
        """Whether the last two steps were surprisingly long."""
        return (
            len(self.measured_seconds) >= 2 and min(self.measured_seconds[-2:]) > _SURPRISE * self.expected_seconds
        )

    @property
    def ratio(self) -> float:
        """What these steps took over what the model predicted; see `ratio_of`."""
        return ratio_of(self.measured_seconds, self.model_seconds)


class Calibration:
    """Ratios of measured to predicted seconds. The same on all ranks, which feed it with the same numbers."""

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return whether anything is known."""
        return bool(self._ratios)

    def take(self, codec: str, ratio: float) -> None:
        """Store the ratio of measured to predicted step time with `codec`, replacing the previous one."""
        least, most = _BOUNDS
        self._ratios[codec] = min(most, max(least, ratio))

    def ratio(self, codec: str) -> float:
        """Return what to multiply a prediction for `codec` with."""
        if not self._ratios:
            return 1.0
        return self._ratios.get(codec) or statistics.fmean(self._ratios.values())


def ratio_of(measured_seconds: Sequence[float], predicted_seconds: float) -> float:
    """Return this rank's median step over the prediction; 0.0 for too few steps, which is so on all ranks."""
    if len(measured_seconds) < LEAST_STEPS:
        return 0.0
    # The first step after a switch makes buckets and states.
    return statistics.median(measured_seconds[1:][-_WINDOW_STEPS:]) / predicted_seconds


def is_same_link(before: LinkModel, now: LinkModel) -> bool:
    """Return whether two measurements may be of a link that did not change."""
    ratio = now.bytes_per_second / before.bytes_per_second
    return 1 / _SAME_LINK < ratio < _SAME_LINK

"""When the shares of ranks change, and to what: a pure function of what all ranks measured.

[Note: when shares change] Every rank takes the same decisions from the same numbers. A large gain is taken at
once, a small one after several windows of steps have shown it, so that chance moves nothing. The step must become
shorter as a whole: where the network is the limit, it does not. Whether it did is looked at afterwards, and if
less than half of what was predicted has come, the old shares return for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.step_model.sample_shares import longest_seconds
from .share_changes import Division

SURE_GAIN = 1.3
"""Taken after one window."""
LEAST_GAIN = 1.05
"""Taken after `SHOWN_WINDOWS` of them in succession."""
SHOWN_WINDOWS = 3
NEW_WEIGHT = 0.3
"""Weight of a window in the running mean."""
REST_WINDOWS = 1
"""Once a change is in force, until the ranks measure again: its first steps are cold."""
MOST_AHEAD_WINDOWS = 20
"""Until a change is taken to be in force: a loop may use more than one loader, and samples then tell nothing."""
LONG_REST_WINDOWS = 10
"""After a change that did not hold what it promised."""


@dataclass(frozen=True)
class Window:
    """What the ranks measured in some steps."""

    sample_seconds: tuple[float, ...]
    """By rank, its computing for one sample; medians, as all here."""
    step_seconds: float
    compute_seconds: float
    """Computing of the slowest rank in a step."""
    whole: int
    """Samples of a batch of all ranks."""
    samples: tuple[int, ...]
    """By rank, in a step; of several batches where gradients are accumulated."""

    def follows(self, division: Division) -> bool:
        """Return whether the steps were divided so: batches may have been drawn long before."""
        passes = max(1, round(sum(self.samples) / self.whole))
        return tuple(passes * each for each in division.counts(self.whole)) == self.samples


@dataclass(frozen=True)
class Decision:
    """New shares."""

    division: Division
    gain: float
    """How many times as fast steps should be; 1.0 where old shares return."""
    returns: bool = False
    """Whether these are the old ones, as the last change did not hold what it promised."""


@dataclass(frozen=True)
class _Trial:
    """A change whose effect is still to be seen."""

    before: Division
    step_seconds: float
    gain: float


class ShareDecision:
    """The decisions of one training. See [Note: when shares change]."""

    def __init__(self, division: Division) -> None:
        """`division`: the shares at the beginning."""
        self.division = division
        self._mean: tuple[float, ...] | None = None
        self._shown = 0
        self._rest = 0
        self._ahead = 0
        """Windows in which batches may still be of before the last change."""
        self._trial: _Trial | None = None

    def take(self, window: Window) -> Decision | None:
        """Return the new shares, if they are to change now."""
        if self._ahead and not window.follows(self.division):
            self._ahead -= 1
            return None
        self._ahead = 0
        if self._rest:
            self._rest -= 1
            return None
        trial, self._trial = self._trial, None
        if trial is not None and trial.step_seconds / window.step_seconds < 1 + (trial.gain - 1) / 2:
            self._change_to(trial.before, LONG_REST_WINDOWS)
            return Decision(trial.before, 1.0, returns=True)
        now = window.sample_seconds
        self._mean = now if self._mean is None else tuple(
            (1 - NEW_WEIGHT) * old + NEW_WEIGHT * new for old, new in zip(self._mean, now, strict=True)
        )  # fmt: skip
        division, gain = self._proposed(window, now)
        if gain < SURE_GAIN:
            division, gain = self._proposed(window, self._mean)
            self._shown = self._shown + 1 if gain >= LEAST_GAIN else 0
            if self._shown < SHOWN_WINDOWS:
                return None
        self._trial = _Trial(self.division, window.step_seconds, gain)
        self._change_to(division, REST_WINDOWS)
        return Decision(division, gain)

    def _change_to(self, division: Division, rest: int) -> None:
        self.division, self._mean, self._shown, self._rest = division, None, 0, rest
        self._ahead = MOST_AHEAD_WINDOWS

    def _proposed(self, window: Window, sample_seconds: tuple[float, ...]) -> tuple[Division, float]:
        """Return the best shares for these times, and how many times as fast steps are with them."""
        best = Division(tuple(1 / each for each in sample_seconds), self.division.cap)
        now, then = (longest_seconds(each.counts(window.whole), best.speeds) for each in (self.division, best))
        saved = window.compute_seconds * (1 - then / now)
        return best, window.step_seconds / max(window.step_seconds - saved, 1e-3 * window.step_seconds)

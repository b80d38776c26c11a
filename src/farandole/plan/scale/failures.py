"""Failures of ranks: what of the time trains, and how often to save.

[Note: time that failures cost] Failures come at a constant rate, independent of each other: a job of N ranks fails
N times as often as one rank. A failure loses the work since the last checkpoint, and a restart follows, which may
fail too. The expected time of an interval of w seconds of work and c of saving, with M seconds between failures
and R of restart, is M e^(R/M) (e^((w + c)/M) - 1): Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22, 2006, section 3. Goodput is w over that. The best w is about sqrt(2 c M) - c
(Young, CACM 17(9), 1974), in Daly's expansion sqrt(2 c M) (1 + sqrt(c/2M)/3 + c/18M) - c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.units import format_seconds, parse_seconds, read_option

RESTART_SECONDS = 300.0
"""Finding that a rank failed, starting the job again and loading: an assumption, not a measurement."""
SAVE_SECONDS = 30.0
"""For which training stops to save a checkpoint: an assumption where no disk was measured."""
_MOST_EXPONENT = 700.0


@dataclass(frozen=True)
class FailureModel:
    """How often ranks fail, and what it costs."""

    every_seconds: float
    """Mean time between two failures of `of_ranks` ranks together."""
    of_ranks: int | None = None
    """None: of the job, whatever its number of ranks."""
    restart_seconds: float = RESTART_SECONDS
    save_seconds: float = SAVE_SECONDS
    """For which training stops at each checkpoint."""
    save_every_seconds: float | None = None
    """Training between two checkpoints; None: Daly's best."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("fail-every", self.every_seconds, 0.0),
            ("checkpoint-every", self.save_every_seconds, 0.0),
            ("checkpoint-seconds", self.save_seconds, 0.0),
        ):
            if value is not None and not least < value < math.inf:
                raise ConfigError(f"{name} {value:g} s: expected a duration above 0")
        if not 0 <= self.restart_seconds < math.inf:
            raise ConfigError(f"restart {self.restart_seconds:g} s: expected a duration from 0")
        if self.of_ranks is not None and self.of_ranks < 1:
            raise ConfigError(f"fail-every: of {self.of_ranks} ranks, expected at least 1")

    def between_seconds(self, ranks: int) -> float:
        """Return the mean time between two failures of a job of `ranks`."""
        return self.every_seconds if self.of_ranks is None else self.every_seconds * self.of_ranks / ranks

    def interval_seconds(self, ranks: int) -> float:
        """Return the training between two checkpoints of a job of `ranks`."""
        if self.save_every_seconds is not None:
            return self.save_every_seconds
        return best_interval(self.save_seconds, self.between_seconds(ranks))

    def goodput(self, ranks: int) -> float:
        """Return the share of the time in which a job of `ranks` does work that it keeps, 0 to 1."""
        return goodput(
            self.interval_seconds(ranks), self.save_seconds, self.restart_seconds, self.between_seconds(ranks)
        )

    def describe(self) -> str:
        """Return who fails how often, in words."""
        every = format_seconds(self.every_seconds)
        if self.of_ranks is None:
            return f"the job fails every {every}, at every number of ranks"
        if self.of_ranks == 1:
            return f"each rank fails every {every}"
        return f"{self.of_ranks:,} ranks together fail every {every}, other numbers in proportion"


def parse_every(text: str) -> tuple[float, int | None]:
    """Read how often who fails: ``3h`` the job, ``3h/16384`` so many ranks together, ``900h/rank`` each rank.

    Raises `ConfigError` for anything else.
    """
    duration, _, who = text.partition("/")
    seconds = read_option("--fail-every", duration, parse_seconds)
    if seconds <= 0:
        raise ConfigError(f"--fail-every {text}: expected more than 0 seconds")
    if "/" not in text:
        return seconds, None
    if who.strip() in ("rank", "job"):
        return seconds, 1 if who.strip() == "rank" else None
    if not who.strip().isdigit() or int(who) < 1:
        raise ConfigError(
            f"--fail-every {text}: {who!r} is no number of ranks",
            remedy="write 3h (the job), 3h/16384 (so many ranks together) or 900h/rank (each rank)",
        )
    return seconds, int(who)


def goodput(work: float, save: float, restart: float, between: float) -> float:
    """Return the share of time that is kept work; all in seconds. See [Note: time that failures cost]."""
    exponent = (work + save) / between
    if exponent + restart / between > _MOST_EXPONENT:
        return 0.0
    return work / (between * math.exp(restart / between) * math.expm1(exponent))


def best_interval(save: float, between: float) -> float:
    """Return Daly's best training time between two checkpoints, in seconds; `between` failures, if too short."""
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(part) / 3 + part / 9) - save

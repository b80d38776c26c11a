"""Rounds of measurements on all ranks at once: what fits into the time, and when it is enough.

[Note: all ranks decide alike] How often an operation is repeated, which sizes are left out and when to stop follow
from times that all ranks have exchanged, or from rank 0's clock. A rank that decided alone would leave the others
waiting in a collective.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...comm.device.accelerator import synchronize
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster import Coefficient, CollectiveCost
from ...core.link import LinkModel, fit_link
from ..intervals import median_interval

# The time of a measurement, divided among phases as they begin. No torch.

SHARES = {"compute": 0.3, "collectives": 0.35, "overlap": 0.12, "codecs": 0.11, "loader": 0.05, "disk": 0.07}
"""Parts of the time, in the order of the phases."""
LEAST_SECONDS = 1.5
"""The smallest budget: each phase makes its fewest rounds. 2 ranks on 2 cores that were given 0 s took 0.9 to 1.1
s (5 runs). Slower machines and links need more, which the job says at its end."""


class PhaseBudget:
    """Gives each phase its share of the remaining time. All ranks make it, and call it alike."""

    def __init__(
        self,
        phases: Sequence[str],
        left_seconds: float,
        *,
        agree: Callable[[float], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            phases: those that will run, in order.
            left_seconds: for all of them.
            agree: returns what rank 0 calls it with, on all ranks.
            clock: in seconds.
        """
        self._phases, self._clock, self._agree = list(phases), clock, agree
        self._end_seconds = clock() + left_seconds

    def begin(self, phase: str) -> float:
        """Return the seconds of `phase`, which begins: the same on all ranks, 0 where no time remains.

        What earlier phases did not need is divided among the later ones, and so is what they took too long.
        """
        open_phases = self._phases[self._phases.index(phase) :]
        left = max(0.0, self._agree(self.left_seconds))
        return left * SHARES[phase] / sum(SHARES[each] for each in open_phases)

    @property
    def left_seconds(self) -> float:
        """The remaining time by this rank's clock; negative: the phases took longer than they were given."""
        return self._end_seconds - self._clock()


LEAST_ROUNDS = 3
MOST_ROUNDS = 25
PRECISE = 0.05
"""Half of an interval over its median: narrower is not needed."""
SAMPLE_SECONDS = 0.004
"""Shorter operations are repeated: what starts and ends a sample shall not count."""
_MOST_REPEATS = 256

Samples = list[list[float]]
"""By round, then by rank."""


@dataclass
class Case:
    """One operation of one size."""

    name: str
    work: float
    """What it does, in bytes or operations: cases of a family are compared by it."""
    measure: Callable[[int], float]
    """Does it so many times; returns the seconds of one."""
    repeats: int = 1


def timed(operation: Callable[[], object], device: torch.device) -> Callable[[int], float]:
    """Return what measures `operation`, a device's queue included."""

    def measure(repeats: int) -> float:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            operation()
        synchronize(device)
        return (time.perf_counter() - begin) / repeats

    return measure


def affordable(
    world: World, family: Sequence[Case], seconds: float, *, sample_seconds: float = SAMPLE_SECONDS
) -> list[Case]:
    """Return the cases of `family`, ascending, of which `LEAST_ROUNDS` fit into `seconds`; two at least.

    Called by all ranks, which run each case to warm it up, and get the same answer. What takes less than
    `sample_seconds` is to be repeated. See [Note: all ranks decide alike].
    """
    kept: list[Case] = []
    spent = 0.0
    for number, case in enumerate(family):
        barrier(world)
        case.measure(1)
        once = max(all_gather_json(world, "measure/once", case.measure(1)))
        case.repeats = min(_MOST_REPEATS, max(1, math.ceil(sample_seconds / max(once, 1e-9))))
        kept.append(case)
        spent += LEAST_ROUNDS * once * case.repeats
        if number + 1 < len(family):
            next_seconds = LEAST_ROUNDS * max(sample_seconds, once * family[number + 1].work / case.work)
            if len(kept) >= 2 and spent + next_seconds > seconds:
                break
    return kept


def sample(world: World, cases: Sequence[Case], seconds: float) -> list[Samples]:
    """Measure all cases in turn, round by round, for about `seconds`; return the samples of each case.

    Stops early when all intervals are narrow. Called by all ranks, which get the same answer.
    """
    found: list[Samples] = [[] for _ in cases]
    begin = time.monotonic()
    for round_ in range(MOST_ROUNDS):
        mine = [0.0] * len(cases)
        for i in range(len(cases)) if round_ % 2 else reversed(range(len(cases))):
            barrier(world)
            mine[i] = cases[i].measure(cases[i].repeats)
        everyone = all_gather_json(world, "measure/round", mine)
        for i, samples in enumerate(found):
            samples.append([each[i] for each in everyone])
        passed = time.monotonic() - begin
        is_enough = round_ + 1 >= LEAST_ROUNDS and (
            passed * (round_ + 2) / (round_ + 1) > seconds or all(is_narrow(samples) for samples in found)
        )
        if all_gather_json(world, "measure/enough", is_enough)[0]:
            break
    return found


def is_narrow(samples: Samples) -> bool:
    """Return whether further rounds would tell little more."""
    return len(samples) > LEAST_ROUNDS and half_width(slowest(samples)) < PRECISE


def slowest(samples: Samples) -> list[float]:
    """Return the time of the slowest rank in each round: a collective, and a step, end with it."""
    return [max(row) for row in samples]


def barrier(world: World) -> None:
    """Let all ranks begin together."""
    if world.group is not None:
        dist.barrier(world.group)


# From samples to figures: medians, rates and fitted costs, each with its 95 % bootstrap interval. No torch.


_DIGITS = 5
_DRAWS = 200
_LEAST_SECONDS = 1e-15
"""What takes no time by the clock: nothing is divided by 0."""
_FLOOR_SHARE = 1e-3
"""A latency that the fit puts at 0 is given as at most this share of the shortest exchange."""


@dataclass(frozen=True)
class SizedExchange:
    """Exchanges of one size, and what each round took on the slowest rank."""

    sent_bytes: float
    rounds: int
    seconds: tuple[float, ...]


def measured(value: float, low: float, high: float) -> Coefficient:
    """Return a measured figure in five digits; the ends are put in order."""
    low, value, high = sorted((low, value, high))
    return Coefficient(_rounded(value), "measured", _rounded(low), _rounded(high))


def seconds_figure(samples: Sequence[float]) -> Coefficient:
    """Return the median of times."""
    median, (low, high) = median_interval([max(each, _LEAST_SECONDS) for each in samples])
    return measured(median, low, high)


def rate_figure(work: float, samples: Sequence[float]) -> Coefficient:
    """Return `work` (bytes, operations) per second, of samples in seconds."""
    median, (low, high) = median_interval([max(each, _LEAST_SECONDS) for each in samples])
    return measured(work / median, work / high, work / low)


def slowdown_figure(together: Sequence[float], alone: Sequence[float]) -> Coefficient:
    """Return by how much something takes longer; pairs of neighbours in time. Never below 1."""
    median, (low, high) = median_interval(
        [a / max(b, _LEAST_SECONDS) for a, b in zip(together, alone, strict=True)]
    )
    return measured(max(1.0, median), max(1.0, low), max(1.0, high))


def half_width(samples: Sequence[float]) -> float:
    """Return half of the interval of the median, as a share of it."""
    median, (low, high) = median_interval(samples)
    return (high - low) / (2 * median) if median > 0 else 0.0


def fit_cost(sizes: Sequence[SizedExchange]) -> CollectiveCost:
    """Return latency and bytes per second that come nearest to exchanges of several sizes (Hockney's model).

    Least squares of errors over the root of the time. With plain errors the largest messages alone would decide;
    with relative ones the delays of small messages, which are longest on busy machines, would be made up for by
    too much bandwidth. The interval is that of fits to rounds drawn with replacement.
    """
    middle = _fit([(each.sent_bytes, each.rounds, statistics.median(each.seconds)) for each in sizes])
    draw = random.Random(0)
    fits = [
        _fit([
            (each.sent_bytes, each.rounds, statistics.median(draw.choices(each.seconds, k=len(each.seconds))))
            for each in sizes
        ])
        for _ in range(_DRAWS)
    ]  # fmt: skip
    latencies, rates = (sorted(column) for column in zip(*fits, strict=True))
    first, last = int(0.025 * _DRAWS), int(0.975 * _DRAWS) - 1
    return CollectiveCost(
        measured(middle[0], min(middle[0], latencies[first]), max(middle[0], latencies[last])),
        measured(middle[1], min(middle[1], rates[first]), max(middle[1], rates[last])),
    )


def _fit(points: Sequence[tuple[float, int, float]]) -> tuple[float, float]:
    """Return latency and bytes per second, both finite and more than 0."""
    kept = [(sent, rounds, max(seconds, _LEAST_SECONDS)) for sent, rounds, seconds in points]
    roots = [math.sqrt(seconds) for _, _, seconds in kept]
    link = fit_link(
        [sent / root for (sent, _, _), root in zip(kept, roots, strict=True)],
        [rounds / root for (_, rounds, _), root in zip(kept, roots, strict=True)],
        roots,
    )
    sent, _, seconds = kept[-1]
    if link is None:
        link = LinkModel(sent / seconds, 0.0)
    rate = link.bytes_per_second if math.isfinite(link.bytes_per_second) else sent / seconds
    shortest = min(seconds / max(1, rounds) for _, rounds, seconds in kept)
    return max(link.latency_seconds, _FLOOR_SHARE * shortest), rate


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS - 1}e}")

"""The time of `farandole measure` by a clock that the test turns: shares of what is left, and budgets refused."""

from __future__ import annotations

import time

import pytest

from farandole.bench.cluster.budget import (
    LEAST_PHASES_SECONDS,
    LEAST_SECONDS,
    REST_SECONDS,
    SHARES,
    PhaseBudget,
    StartMoment,
    require_enough,
)
from farandole.bench.cluster.overlap import _next_count
from farandole.core.vocabulary.errors import ConfigError


class TurnedClock:
    """A clock that stands still until it is turned, in seconds."""

    now = 50.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def run_phases(*took: float, names: tuple[str, ...] = tuple(SHARES)) -> tuple[list[float], float]:
    """Return what each phase is given of 10 s, and what is left, if they take so many times their share."""
    clock = TurnedClock()
    budget = PhaseBudget(names, 10.0, agree=lambda mine: mine, clock=clock)
    given = []
    for name, factor in zip(names, took, strict=True):
        given.append(budget.begin(name))
        clock.now += factor * given[-1]
    return given, budget.left_seconds


def test_phases_share_what_is_left() -> None:
    given, left = run_phases(*[1.0] * 6)
    assert given == pytest.approx([10 * share for share in SHARES.values()])
    assert left == pytest.approx(0.0)
    early, left = run_phases(0.0, *[1.0] * 5)
    assert early[1] == pytest.approx(10 * 0.35 / 0.7), "what a phase does not need goes to the later ones"
    assert left == pytest.approx(0.0)
    late, left = run_phases(2.0, *[1.0] * 5)
    assert late[1] == pytest.approx(4 * 0.35 / 0.7), "and what it takes too long is theirs to save"
    assert left == pytest.approx(0.0)
    over, left = run_phases(5.0, *[1.0] * 5)
    assert over[1:] == [0.0] * 5, "nothing is left: the fewest rounds"
    assert left == pytest.approx(-5.0)
    alone, left = run_phases(*[1.0] * 5, names=tuple(name for name in SHARES if name != "overlap"))
    assert sum(alone) == pytest.approx(10.0), "a phase that does not run has no share"


def test_ranks_take_the_answer_of_rank_0() -> None:
    clock = TurnedClock()
    budget = PhaseBudget(["loader", "disk"], 10.0, agree=lambda mine: 6.0, clock=clock)
    assert budget.begin("loader") == pytest.approx(6.0 * 5 / 12)


def test_a_start_that_took_too_long_is_refused_with_the_smallest_budget() -> None:
    passed = LEAST_SECONDS - REST_SECONDS - LEAST_PHASES_SECONDS
    assert passed > 2.9, "the least that the command line takes suffices with the slowest start that was measured"
    assert require_enough(LEAST_SECONDS, passed - 1e-6) >= LEAST_PHASES_SECONDS
    with pytest.raises(
        ConfigError, match=r"--seconds 8: starting the ranks took 6 s.* at least --seconds 9$"
    ) as info:
        require_enough(8.0, 6.0)
    assert require_enough(9.0, 6.0) > 0, info.value


def test_the_moment_of_the_start_travels_in_a_word() -> None:
    now = StartMoment.now()
    assert StartMoment.parse(now.to_text()).machine == now.machine
    ago = StartMoment(now.machine, now.monotonic_seconds - 30.0, now.wall_seconds + 1e6)
    assert 30.0 <= StartMoment.parse(ago.to_text()).passed_seconds() < 90.0, "one machine has one clock"
    elsewhere = StartMoment("another", now.monotonic_seconds + 1e6, time.time() - 30.0)
    assert 30.0 <= elsewhere.passed_seconds() < 90.0
    assert StartMoment("another", 0.0, time.time() + 1e6).passed_seconds() == 0.0
    with pytest.raises(ValueError, match="unpack"):
        StartMoment.parse("here")


def test_rounds_of_overlap_become_shorter_where_they_take_too_long() -> None:
    assert _next_count(100, 1, 1.0, 1.0, 3.0) == 100
    assert _next_count(100, 1, 2.0, 2.0, 3.0) == 25, "two rounds are to come in the second that is left"
    assert _next_count(100, 2, 9.0, 7.0, 3.0) == 2, "the fewest rounds are made"
    assert _next_count(100, 3, 3.0, 1.0, 3.0) == 0
    assert _next_count(100, 3, 1.5, 0.5, 3.0) == 100

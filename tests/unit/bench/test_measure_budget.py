"""The time of `farandole measure` by a clock that the test turns: shares of what is left; and busy machines."""

from __future__ import annotations

import pytest

from farandole.bench.cluster.rounds import SHARES, PhaseBudget
from farandole.bench.cluster.worker import _next_count
from farandole.core.host.process_status import CoreTime, busy_machines


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


def of(machine_seconds: float, own_seconds: float, boot: str = "a") -> CoreTime:
    return CoreTime(boot, 4, 10.0, machine_seconds, own_seconds)


def test_what_other_programs_take_is_said_by_machine() -> None:
    assert busy_machines([of(20.0, 10.0), of(20.0, 9.0)]) == "", "0.1 cores of 4 are little"
    said = busy_machines([of(36.0, 10.0), of(36.0, 10.0)])
    assert said == "other programs took 1.6 of 4 cores meanwhile: an idle machine gives more"
    two = busy_machines([of(36.0, 10.0), of(30.0, 10.0, "b"), of(10.0, 10.0, "c")])
    assert "took 2.6 of 4 cores and 2.0 of 4 cores meanwhile" in two
    assert busy_machines([of(36.0, 10.0, "")]) == "", "a system that does not tell"


def test_what_a_process_takes_itself_is_no_other_s() -> None:
    begin = CoreTime.now()
    while CoreTime.now().own_seconds < begin.own_seconds + 0.2:
        pass
    span = CoreTime.now().since(begin)
    assert span.own_seconds >= 0.2
    assert span.machine_seconds >= span.own_seconds - 0.05, "ticks of 10 ms"


def test_rounds_of_overlap_become_shorter_where_they_take_too_long() -> None:
    assert _next_count(100, 1, 1.0, 1.0, 3.0) == 100
    assert _next_count(100, 1, 2.0, 2.0, 3.0) == 25, "two rounds are to come in the second that is left"
    assert _next_count(100, 2, 9.0, 7.0, 3.0) == 2, "the fewest rounds are made"
    assert _next_count(100, 3, 3.0, 1.0, 3.0) == 0
    assert _next_count(100, 3, 1.5, 0.5, 3.0) == 100

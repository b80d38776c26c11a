"""How often a link is measured again, on a clock of the test's own: at most 1 % of the time, whatever steps do."""

from __future__ import annotations

import itertools

import pytest

from farandole.comm.autotune.autotuner import LEAST_PAUSE_SECONDS, SHARE, Pause

STEP_SECONDS = 0.004


def simulate(run_seconds: float, look_seconds: float, *, late: bool, changed: bool = False) -> list[float]:
    """Return when the link was looked at in a run of short steps; the first look is at 0."""
    pause, now, looks = Pause(), 0.0, [0.0]
    pause.looked(-10 * look_seconds, 0.0, look_seconds, changed=True, late=False)  # which does more
    while now < run_seconds:
        now += STEP_SECONDS
        if pause.is_over(now, late=late):
            pause.looked(now, now + look_seconds, look_seconds, changed=changed, late=late)
            now += look_seconds
            looks.append(now)
            assert pause.spent_seconds <= 1.001 * SHARE * now, "never more than its share"
    return looks


@pytest.mark.parametrize("look_seconds", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_looks_have_a_least_pause_and_take_one_percent_at_most(
    late: bool, changed: bool, look_seconds: float
) -> None:
    looks = simulate(600, look_seconds, late=late, changed=changed)
    pauses = [after - before for before, after in itertools.pairwise(looks)]
    assert len(looks) > 2
    assert min(pauses) >= LEAST_PAUSE_SECONDS


def test_steps_that_are_always_late_do_not_ask_for_ever() -> None:
    """Where the model of a step is wrong no look helps: 120 looks in 600 short steps were seen."""
    assert len(simulate(2.4, 0.01, late=True)) == 1
    assert len(simulate(600, 0.01, late=True)) < 20
    assert len(simulate(600, 0.01, late=True, changed=True)) > 100, "as long as each finds another link"


def test_a_link_that_becomes_slow_is_looked_at_at_once() -> None:
    pause, look_seconds = Pause(), 0.1
    pause.looked(0.0, 1.0, look_seconds, changed=True, late=False)
    assert not pause.is_over(1.0 + LEAST_PAUSE_SECONDS, late=True), "a tenth of a second is 1 % of ten"
    assert not pause.is_over(20.0, late=False)
    assert pause.is_over(20.0, late=True)


def test_before_the_first_look_nobody_asks() -> None:
    assert not Pause().is_over(1e9, late=True)

"""Failures and the largest of many: formulas against tables, against simulations, and bad input."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from farandole.core.link import largest_normal
from farandole.core.vocabulary.errors import ConfigError
from farandole.plan.scaling import FailureModel, best_interval, goodput, parse_every


@pytest.mark.parametrize(
    ("ranks", "normal"), [(2, 0.5642), (4, 1.0294), (64, 2.344), (1024, 3.248), (16384, 3.971)]
)
def test_the_largest_of_many(ranks: int, normal: float) -> None:
    assert largest_normal(ranks) == pytest.approx(normal, abs=2e-3), "standard deviations above the mean"


def test_the_largest_of_two_normals_is_exact() -> None:
    assert largest_normal(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-12), "closed form"
    assert largest_normal(1) == pytest.approx(0.0, abs=1e-12), "one rank is the mean"


def simulate_goodput(
    work: float, save: float, restart: float, between: float, *, intervals: int, seed: int = 0
) -> float:
    """Return the share of kept work in a job of so many `intervals`, failure by failure.

    Times are seconds. What `goodput` is checked against: nothing of its formula is used here.
    """
    draw = random.Random(seed)
    clock, failure, done = 0.0, draw.expovariate(1 / between), 0
    while done < intervals:
        end = clock + work + save
        if failure >= end:
            clock, done = end, done + 1
            continue
        clock = failure
        while True:  # a restart may fail too
            failure = clock + draw.expovariate(1 / between)
            if failure >= clock + restart:
                clock += restart
                break
            clock = failure
    return intervals * work / clock


@pytest.mark.parametrize(("save", "between"), [(10.0, 600.0), (60.0, 10_800.0), (30.0, 1_000.0)])
def test_goodput_and_its_optimum_are_those_of_a_simulation(save: float, between: float) -> None:
    best = best_interval(save, between)
    simulated = simulate_goodput(best, save, 120.0, between, intervals=40_000)
    assert goodput(best, save, 120.0, between) == pytest.approx(simulated, rel=0.01), "the formula"
    for other in (best / 3, best * 3):
        worse = simulate_goodput(other, save, 120.0, between, intervals=20_000)
        assert worse < simulated - 0.005, f"{other:.0f} s between checkpoints instead of {best:.0f} s"
    exact = max(goodput(best * 1.01**i, save, 120.0, between) for i in range(-60, 61))
    assert goodput(best, save, 120.0, between) > exact - 1e-4, "Daly's interval is the best one"


def test_who_fails() -> None:
    job = FailureModel(*parse_every("3h"))
    assert job.between_seconds(8) == job.between_seconds(16_384) == 10_800, "the job, at every number of ranks"
    some = FailureModel(*parse_every("3h/16384"))
    assert some.between_seconds(8_192) == 21_600, "half as many fail half as often"
    each = FailureModel(*parse_every("1000h/rank"))
    assert each.between_seconds(1000) == 3600, "each rank"
    assert "each rank" in each.describe()
    assert "job" in job.describe()
    assert "16,384" in some.describe()


def test_a_job_that_fails_all_the_time_does_nothing() -> None:
    assert goodput(3600, 30, 300, 1.0) == 0.0, "no overflow"
    assert best_interval(100, 20) == 20, "saving takes longer than it goes well"


@pytest.mark.parametrize("text", ["0h", "3h/0", "3h/-1", "3h/x", "three", "", "3h/", "-3h"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_every(text)


def test_other_figures_that_are_none() -> None:
    for wrong in ({"save_seconds": 0.0}, {"save_every_seconds": -1.0}, {"restart_seconds": math.inf}):
        with pytest.raises(ConfigError, match="duration"):
            replace(FailureModel(100.0), **wrong)  # type: ignore[arg-type]

"""Noise and failures: formulas against tables, against simulations, and bad input."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from farandole.core.step_model.slowest import largest_normal
from farandole.core.vocabulary.errors import ConfigError
from farandole.plan.scale.failures import (
    FailureModel,
    best_interval,
    goodput,
    parse_every,
)
from farandole.plan.scale.loader import Loading
from farandole.plan.scale.noise import Noise, largest_of


@pytest.mark.parametrize(
    ("ranks", "normal"), [(2, 0.5642), (4, 1.0294), (64, 2.344), (1024, 3.248), (16384, 3.971)]
)
def test_the_largest_of_many(ranks: int, normal: float) -> None:
    assert largest_normal(ranks) == pytest.approx(normal, abs=2e-3), "standard deviations above the mean"


def test_the_largest_of_two_normals_is_exact() -> None:
    assert largest_normal(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-12), "closed form"
    assert largest_normal(1) == pytest.approx(0.0, abs=1e-12), "one rank is the mean"


def test_resampled_times() -> None:
    noise = Noise.of_times([2.0, 2.0, 2.0, 6.0])
    assert noise.measured == (2 / 3, 2 / 3, 2 / 3, 2.0), "beside their mean"
    assert noise.largest_quantile(0.5, 1) == 2 / 3, "one draw: three of four"
    assert noise.largest_quantile(0.5, 10_000) == 2.0, "never above what was measured"


# The largest of 32: by the table of normal numbers; the harmonic number of 32; the sum over the sorted times.
FACTORS = [each / 1.02 for each in (0.8, 0.9, 1, 1.1, 1.3)]
LARGEST_OF_FACTORS = math.fsum(each * (((i + 1) / 5) ** 32 - (i / 5) ** 32) for i, each in enumerate(FACTORS))


@pytest.mark.parametrize(
    ("noise", "mean"),
    [
        (Noise(0.1), 1 + 0.1 * largest_normal(32)),
        (Noise(0.1, "exponential"), 0.9 + 0.1 * math.fsum(1 / each for each in range(1, 33))),
        (Noise.of_times([1, 1.1, 1.3, 0.8, 0.9]), LARGEST_OF_FACTORS),
    ],
)
def test_levels_average_to_the_mean(noise: Noise, mean: float) -> None:
    levels = [noise.largest_quantile((i + 0.5) / 4000, 32) for i in range(4000)]
    assert math.fsum(levels) / 4000 == pytest.approx(mean, rel=1e-3), "of 32 ranks"
    groups = [largest_of(noise, [(12, 1.0), (20, 1.0)], (i + 0.5) / 400) for i in range(400)]
    assert math.fsum(groups) / 400 == pytest.approx(mean, rel=5e-3), "in two groups"


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
    for bad in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="noise"):
            Noise(bad)
    with pytest.raises(ConfigError, match="at least 2"):
        Noise.of_times([1.0])
    for wrong in ({"save_seconds": 0.0}, {"save_every_seconds": -1.0}, {"restart_seconds": math.inf}):
        with pytest.raises(ConfigError, match="duration"):
            replace(FailureModel(100.0), **wrong)  # type: ignore[arg-type]
    for values in ({"workers": 0}, {"storage_bytes_per_second": 0.0}):
        with pytest.raises(ConfigError, match="expected more than 0"):
            replace(Loading(), **values)


def test_loading() -> None:
    loading = Loading(1e6, workers=2, storage_bytes_per_second=1e7)
    assert loading.seconds(4e6, 8e6) == 2.0, "two workers make 2 MB/s"
    assert loading.seconds(4e6, 4e7) == 4.0, "all read from one place"
    assert Loading().seconds(1e9, 1e9) == 0.0, "nothing is known: no limit"

"""The critical batch from squares of gradients: unbiased, within its interval, and None where noise hides it."""

from __future__ import annotations

import math
import random

import pytest

from farandole.train.noise_scale import NoiseEstimate

G = (3.0, -1.0, 0.5, 2.0)
"""A true gradient: its square is 14.25."""
SQUARE = sum(each * each for each in G)
SIGMA = 4.0
"""Standard deviation of each of its elements, of one sample: tr(Sigma) is 64."""
VARIANCE = len(G) * SIGMA**2


def a_step(draw: random.Random, samples: list[int]) -> tuple[float, float, int, float]:
    """Gradients of ranks with so many samples each, and their mean, as a reading."""
    batch = sum(samples)
    own, mean = 0.0, [0.0] * len(G)
    for count in samples:
        gradient = [each + draw.gauss(0.0, SIGMA / math.sqrt(count)) for each in G]
        own += count / batch * sum(each * each for each in gradient)
        mean = [total + count / batch * each for total, each in zip(mean, gradient, strict=True)]
    return own, sum(each * each for each in mean), len(samples), float(batch)


@pytest.mark.parametrize("samples", [[2, 2], [1, 1, 1, 1], [1, 3], [5, 1, 2]])
def test_estimates_are_those_of_the_closed_form(samples: list[int]) -> None:
    """B_noise = 64 / 14.25 samples, for equal and unequal ranks."""
    draw, estimate = random.Random(1), NoiseEstimate(1 - 1e-9)
    for _ in range(5_000):
        estimate.add(*a_step(draw, samples))
    assert estimate.gradient_square == pytest.approx(SQUARE, rel=0.05), "|G|^2 is not biased"
    assert estimate.variance == pytest.approx(VARIANCE, rel=0.05), "tr(Sigma) is not biased"
    assert estimate.critical_batch == pytest.approx(VARIANCE / SQUARE, rel=0.06), "and neither is their ratio"


def test_the_truth_is_in_95_of_100_intervals() -> None:
    draw, hits = random.Random(2), 0
    for _ in range(100):
        estimate = NoiseEstimate(0.99)
        for _ in range(200):
            estimate.add(*a_step(draw, [2, 2]))
        low, high = estimate.interval() or (math.inf, -math.inf)
        hits += low <= VARIANCE / SQUARE <= high
    assert 88 <= hits <= 99, f"{hits} of 100 intervals hold the truth, expected about 95"


def test_averages_forget_what_is_old() -> None:
    estimate = NoiseEstimate(0.9)
    for _ in range(50):
        estimate.add(20.0, 12.0, 2, 10.0)
    for _ in range(100):
        estimate.add(200.0, 120.0, 2, 20.0)
    assert estimate.gradient_square == pytest.approx(40.0, rel=1e-3), "(2 x 120 - 200) / 1"
    assert estimate.variance == pytest.approx(1600.0, rel=1e-3), "(200 - 120) x 20 / 1"
    assert estimate.critical_batch == pytest.approx(40.0, rel=1e-3), "their ratio, in samples"


def test_a_scale_of_the_loss_changes_nothing() -> None:
    plain, scaled = NoiseEstimate(0.9), NoiseEstimate(0.9)
    for own, mean in ((20.0, 12.0), (24.0, 15.0), (18.0, 13.0)):
        plain.add(own, mean, 4, 32.0)
        scaled.add(own * 1024.0**2, mean * 1024.0**2, 4, 32.0)
    assert scaled.critical_batch == plain.critical_batch, "it divides out, and 1024 is a power of two"


def test_nothing_is_known_where_noise_hides_the_gradient() -> None:
    estimate = NoiseEstimate(0.99)
    assert estimate.critical_batch is None, "before the first reading"
    assert math.isnan(estimate.variance), "before the first reading"
    estimate.add(20.0, 9.0, 2, 10.0)
    assert estimate.gradient_square < 0, "2 x 9 - 20"
    assert estimate.critical_batch is None, "|G|^2 is not above 0"
    assert estimate.interval() is None, "and so nothing is said about it"
    draw, hidden = random.Random(3), NoiseEstimate(0.99)
    for _ in range(30):
        own, mean, ranks, batch = a_step(draw, [1, 1])
        hidden.add(own - SQUARE + 0.01, mean - SQUARE + 0.01, ranks, batch)
    assert hidden.critical_batch is None or (hidden.interval() or (0, 0))[1] == math.inf, "no upper end is told"


def test_other_units_begin_anew() -> None:
    estimate = NoiseEstimate(0.99)
    estimate.add(2e9, 1.2e9, 2, 10.0)
    estimate.restart()
    estimate.add(20.0, 12.0, 2, 10.0)
    assert (estimate.count, estimate.gradient_square) == (1, 4.0), "nothing of the old units is left"

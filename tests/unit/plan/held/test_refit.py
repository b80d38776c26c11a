"""Refitting a cluster: planted figures come back, others stay."""

from __future__ import annotations

import random

import pytest

from farandole.core.cluster import (
    OPERATIONS,
    Cluster,
    Coefficient,
    CollectiveCost,
    ComputeRate,
    Device,
    Tier,
)
from farandole.core.vocabulary.errors import ConfigError
from farandole.plan.refit import (
    Observation,
    figures_below,
    non_negative_least_squares,
    note_runs,
    refit,
    with_figures,
)

ALL_REDUCE = "tiers.0.collectives.all_reduce"


def measured(value: float) -> Coefficient:
    return Coefficient(value, "measured")


CLUSTER = Cluster(
    "two hosts",
    Device(
        "cpu",
        measured(4e9),
        measured(1e10),
        measured(1e-5),
        {"fp32": (ComputeRate(1e6, measured(1e9)), ComputeRate(1e9, measured(5e9)))},
    ),
    (Tier("host", 4, dict.fromkeys(OPERATIONS, CollectiveCost(measured(1e-4), measured(1e8)))),),
)


def observations(latency: float, speed: float, *, noise: float = 0.02) -> list[Observation]:
    draw = random.Random(0)
    return [
        Observation(
            f"bucket of {nbytes} bytes",
            (6 * latency + nbytes / speed) * draw.gauss(1, noise),
            {f"{ALL_REDUCE}.latency_seconds": 6, f"{ALL_REDUCE}.bytes_per_second": nbytes},
        )
        for nbytes in (20_000, 100_000, 500_000, 2_000_000)
        for _ in range(8)
    ]


def test_planted_latency_and_bandwidth_are_found_with_their_intervals() -> None:
    found = refit(CLUSTER, observations(5e-4, 2.5e7))
    figures = {each.path: each.after for each in found.corrections}
    assert set(figures) == {f"{ALL_REDUCE}.latency_seconds", f"{ALL_REDUCE}.bytes_per_second"}
    for name, planted in (("latency_seconds", 5e-4), ("bytes_per_second", 2.5e7)):
        figure = figures[f"{ALL_REDUCE}.{name}"]
        assert figure.value == pytest.approx(planted, rel=0.05), name
        assert figure.source == "fitted"
        low, high = figure.interval()
        assert low <= figure.value <= high, name
        assert high / low < 1.2, "32 observations with 2 % of noise tell more than that"
    cost = found.cluster.tiers[0].collectives["all_reduce"]
    assert cost.bytes_per_second == figures[f"{ALL_REDUCE}.bytes_per_second"]
    assert found.cluster.device == CLUSTER.device, "what was not observed stays"
    assert found.error_after < 0.03 < found.error_before


def test_figures_that_are_right_stay_as_they_are() -> None:
    found = refit(CLUSTER, observations(1e-4, 1e8))
    assert found.cluster == CLUSTER
    assert found.corrections == ()


def test_all_figures_below_a_path_change_by_one_factor() -> None:
    found = refit(CLUSTER, [Observation("compute", 0.3, {"device.compute.fp32.*": 0.1})])
    rates = [rate.flops_per_second for rate in found.cluster.device.compute["fp32"]]
    assert [rate.value for rate in rates] == pytest.approx([1e9 / 3, 5e9 / 3], rel=0.01)
    low, high = rates[0].interval()
    assert low < 0.9 * rates[0].value < rates[0].value < high, "one number is little to go by"


def test_a_part_that_no_figure_explains_is_taken_off() -> None:
    seen = Observation("optimizer", 0.3, {"device.memory_bytes_per_second": 1e9}, other_seconds=0.2)
    assert refit(CLUSTER, [seen]).corrections == (), "1e9 bytes at 1e10 a second are the other 0.1 s"


def test_a_latency_of_zero_can_be_found() -> None:
    zero = with_figures(CLUSTER, {f"{ALL_REDUCE}.latency_seconds": measured(0.0)})
    found = refit(zero, observations(5e-4, 1e8))
    assert found.cluster.tiers[0].collectives["all_reduce"].latency_seconds.value == pytest.approx(5e-4, rel=0.05)


def test_a_latency_that_vanishes_in_the_fit_is_taken_to_a_tenth() -> None:
    """Buckets of so many bytes say nothing of it: five nanoseconds were written."""
    found = refit(CLUSTER, observations(0.0, 1e8))
    before, after = (each.tiers[0].collectives["all_reduce"].latency_seconds for each in (CLUSTER, found.cluster))
    assert after.value == pytest.approx(before.value / 10)
    # The others are found beside it, and the error is that of the file that is written.
    slow = with_figures(CLUSTER, {f"{ALL_REDUCE}.latency_seconds": measured(5e-3)})
    seen = observations(0.0, 2.5e7)
    refitted = refit(slow, seen)
    cost = refitted.cluster.tiers[0].collectives["all_reduce"]
    errors = [
        abs(6 * cost.latency_seconds.value + each.features[f"{ALL_REDUCE}.bytes_per_second"]
            / cost.bytes_per_second.value - each.seconds) / each.seconds
        for each in seen
    ]  # fmt: skip
    assert refitted.error_after == pytest.approx(sum(errors) / len(errors), rel=0.01)
    assert refitted.error_after < refitted.error_before


def test_nothing_to_fit_and_unknown_figures_are_errors() -> None:
    with pytest.raises(ConfigError, match="there is nothing to fit"):
        refit(CLUSTER, [Observation("pauses", 1.0, {})])
    for path in ("tiers.1.collectives.all_reduce.bytes_per_second", "device.compute.bf16.*", "device.speed"):
        with pytest.raises(ConfigError, match="there is no figure"):
            figures_below(CLUSTER, path)
    both = {f"{ALL_REDUCE}.*": 1.0, f"{ALL_REDUCE}.latency_seconds": 1.0}
    with pytest.raises(ConfigError, match="observations speak of"):
        refit(CLUSTER, [Observation("twice", 1.0, both)])


def test_a_run_is_fitted_to_once() -> None:
    noted = note_runs(CLUSTER, ["runs/a", "runs/b"])
    assert noted.fingerprint["fitted_to"] == "runs/a; runs/b"
    with pytest.raises(ConfigError, match="fitted to runs/b already"):
        note_runs(noted, ["runs/b"])


def test_least_squares_without_negative_coefficients() -> None:
    draw = random.Random(1)
    rows = [[draw.random() for _ in range(4)] for _ in range(30)]
    true = [2.0, 0.0, 0.5, 1.0]
    targets = [sum(a * x for a, x in zip(row, true, strict=True)) for row in rows]
    found = non_negative_least_squares(rows, targets, near=[1.0] * 4, pull=1e-9)
    assert found == pytest.approx(true, abs=1e-4)
    found = non_negative_least_squares([[1.0, 1.0]], [4.0], near=[1.0, 1.0], pull=1e-6)
    assert found == pytest.approx([2.0, 2.0], rel=1e-3), "what is not told apart changes together"

"""Figures from samples: fits give back what was put in, intervals hold the value, and slow ranks are named."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.bench.cluster.compute import attention, slow_ranks
from farandole.bench.cluster.exchanges import elements_of
from farandole.bench.cluster.measure import format_changes, format_cluster
from farandole.bench.cluster.rounds import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Case,
    SizedExchange,
    affordable,
    fit_cost,
    half_width,
    measured,
    rate_figure,
    sample,
    seconds_figure,
    slowdown_figure,
)
from farandole.comm.world.world import World
from farandole.core.cluster import collective_work, compare_clusters
from farandole.core.cluster_file import check_cluster
from farandole.train.analysis.record import flops_of
from tests.unit.core.test_cluster_file import small_cluster

LATENCY, RATE = 4e-5, 1.2e9


def test_attention_is_measured_as_planners_count_it() -> None:
    seen = list[float]()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.append(flops_of(func, args, kwargs or {}, out) or 0.0)
            return out

    case = attention(torch.bfloat16, torch.device("cpu"), heads=2, tokens=16, width=8)
    with Counted():
        assert case.measure(1) > 0.0
    assert case.work == 7 * 2 * 16 * 17 * 8, "2 products forward and 5 backward, of half of all scores"
    assert sum(seen) == case.work


@pytest.fixture
def alone() -> World:
    """Return a world of one rank."""
    return World(0, 1, 0, 1, 0, 1, "host", None, torch.device("cpu"), "alone", 60.0)


def exchanges(noise: float = 0.0) -> list[SizedExchange]:
    """Return exchanges over a link of known figures, of 4 KiB to 16 MiB."""
    draw = random.Random(3)
    found = []
    for nbytes in (2**12, 2**15, 2**18, 2**21, 2**24):
        work = collective_work("all_reduce", 4, nbytes)
        seconds = work.rounds * LATENCY + work.sent_bytes / RATE
        times = tuple(seconds * (1 + noise * draw.uniform(-1, 1)) for _ in range(9))
        found.append(SizedExchange(work.sent_bytes, work.rounds, times))
    return found


def test_a_fit_gives_back_latency_and_bandwidth() -> None:
    cost = fit_cost(exchanges())
    assert cost.latency_seconds.value == pytest.approx(LATENCY, rel=1e-4)
    assert cost.bytes_per_second.value == pytest.approx(RATE, rel=1e-4)
    noisy = fit_cost(exchanges(noise=0.1))
    assert noisy.latency_seconds.value == pytest.approx(LATENCY, rel=0.1), "large messages do not drown it"
    low, high = noisy.bytes_per_second.interval()
    assert low < RATE < high, "the interval holds the truth"
    assert high / low < 1.3, "and is no wider than the noise"
    assert noisy.bytes_per_second.source == "measured"


def test_fits_of_strange_times_are_possible_figures() -> None:
    same = [SizedExchange(float(size), 2, (0.001,) * 3) for size in (4096, 2**20)]
    falling = [SizedExchange(4096.0, 2, (0.01,) * 3), SizedExchange(float(2**20), 2, (0.001,) * 3)]
    no_latency = [
        SizedExchange(4096.0, 2, (4096 / RATE,) * 3),
        SizedExchange(float(2**20), 2, (2**20 / RATE,) * 3),
    ]
    nothing = [SizedExchange(4096.0, 2, (0.0,) * 3), SizedExchange(float(2**20), 2, (0.0,) * 3)]
    for rows in (same, falling, no_latency, nothing):
        cost = fit_cost(rows)
        for figure in (cost.latency_seconds, cost.bytes_per_second):
            low, high = figure.interval()
            assert 0 < low <= figure.value <= high < float("inf"), (rows, figure)


def test_medians_and_their_intervals() -> None:
    figure = rate_figure(1e6, [0.01, 0.02, 0.01, 0.01, 0.01])
    assert figure.value == 1e8
    assert figure.interval() == (5e7, 1e8)
    assert seconds_figure([3e-10, 3e-10, 3e-10]).value == 3e-10, "seconds per byte are small"
    assert slowdown_figure([2.0, 2.2, 2.1], [1.0, 1.0, 1.0]).value == 2.1
    assert slowdown_figure([0.9] * 3, [1.0] * 3).interval() == (1.0, 1.0), "noise does not make it faster"
    assert measured(1.0, 2.0, 0.5).interval() == (0.5, 2.0)
    assert half_width([1.0] * 5) == 0.0


def test_ranks_that_are_slow_all_the_time_are_named() -> None:
    rows = [[1.0, 1.02, 1.5, 0.99] for _ in range(6)]
    assert slow_ranks(rows) == {2: pytest.approx(0.67, abs=0.01)}
    once = [[1.0, 1.0, 1.0, 1.0] for _ in range(6)]
    once[3][1] = 3.0
    assert slow_ranks(once) == {}, "once is no habit"
    assert slow_ranks([[1.0]] * 3) == {}


def test_what_does_not_fit_into_the_time_is_left_out(alone: World) -> None:
    ran: list[str] = []

    def case(name: str, work: float, seconds: float) -> Case:
        def measure(repeats: int) -> float:
            ran.append(name)
            return seconds

        return Case(name, work, measure)

    family = [case("small", 1.0, 0.001), case("middle", 10.0, 0.01), case("large", 1e4, 10.0)]
    kept = affordable(alone, family, 0.5)
    assert [each.name for each in kept] == ["small", "middle"]
    assert "large" not in ran, "what cannot fit is not even tried"
    assert kept[0].repeats == 4, "short ones are repeated until a sample is long enough"
    assert [each.name for each in affordable(alone, family, 1e6)] == ["small", "middle", "large"]
    ran.clear()
    (steady,) = sample(alone, [case("steady", 1.0, 0.25)], 60.0)
    assert LEAST_ROUNDS <= len(steady) <= LEAST_ROUNDS + 1 < MOST_ROUNDS, "narrow intervals end it early"
    assert steady[0] == [0.25]


def test_elements_are_divided_by_the_ranks() -> None:
    for nbytes, width in ((4096, 2), (4096, 3), (1, 7), (2**24, 5)):
        count = elements_of(nbytes, width)
        assert count % width == 0, (nbytes, width)
        assert nbytes <= 4 * count < nbytes + 4 * width + 4, (nbytes, width)


def test_pages_have_all_figures() -> None:
    cluster = small_cluster()
    check_cluster(cluster, "a cluster")
    text = format_cluster(cluster)
    for words in ("network (4 ranks) all_reduce", "disk, writing", "powersgd:rank=4", "rank 3 has 0.66 times"):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 100
    same = format_changes(compare_clusters(cluster, cluster), ("a", "b"))
    assert "have the same" in same
    other = small_cluster(disk_write_bytes_per_second=None)
    differing = format_changes(compare_clusters(cluster, other), ("a", "b"))
    assert "disk_write_bytes_per_second" in differing
    assert "only one has it" in differing
    assert "1 figure differs" in differing

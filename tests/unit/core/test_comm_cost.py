"""What an exchange takes, by the classic worked examples; and that the ring's factor is written once."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import farandole
from farandole.bench.intervals import least_bytes
from farandole.core.link import (
    LinkModel,
    communication_seconds,
    fit_link,
    ring_bytes,
    ring_factor,
    ring_sent_bytes,
    sum_seconds,
)


def test_worked_examples() -> None:
    # 100 MB to send at 1250 MB/s is 0.08 s; the 2 (4 - 1) = 6 rounds of a ring of 4 add 0.1 ms each.
    assert communication_seconds(100e6, 1250e6, 6, 1e-4) == pytest.approx(0.0806)
    # To sum 100 MB, each of the 4 sends 150 MB.
    assert ring_bytes(100e6, 4) == 150e6
    assert [ring_factor(n) for n in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]
    assert ring_factor(4, passes=1) == 0.75


def test_whole_bytes_are_exact() -> None:
    assert [ring_sent_bytes(1000, n) for n in (1, 2, 4, 5)] == [0, 1000, 1500, 1600]
    assert ring_sent_bytes(3 * 10**18 + 3, 3) == 4 * 10**18 + 4, "no float has so many digits"


def test_the_benchmark_and_the_tuner_say_the_same() -> None:
    assert least_bytes("all_reduce", 1000, 4) == ring_bytes(1000, 4)
    assert least_bytes("all_gather", 1000, 4) == ring_bytes(1000, 4, passes=1)
    found = sum_seconds(LinkModel(1250e6, 1e-4, 0.0, pair_seconds=5e-5), 4, 100_000_000)
    assert found["parts"] == pytest.approx(0.1202), "150 MB in two rounds"
    assert found["direct"] == pytest.approx(0.2401), "300 MB in one"
    assert found["doubling"] == pytest.approx(0.1601), "100 MB in each of two, to one rank"


def test_a_fit_gives_back_what_was_put_in() -> None:
    sent = [1e6, 2e6, 4e6, 0.3e6]
    link = fit_link(sent, [4] * 4, [communication_seconds(b, 125e6, 4, 2e-4) for b in sent])
    assert link is not None
    assert (link.bytes_per_second, link.latency_seconds) == pytest.approx((125e6, 2e-4))
    alike = fit_link([1e6] * 3, [2] * 3, [0.011] * 3)
    assert alike is not None
    assert (alike.bytes_per_second, alike.latency_seconds) == pytest.approx((1e6 / 0.011, 0.0))
    assert fit_link([], [], []) is None
    assert fit_link([0.0], [2], [0.1]) is None


_FACTOR = re.compile(r"2 ?\* ?\([\w.]+ - 1\)|\([\w.]*(size|ranks|parties|processes|world)\w* - 1\) ?/")


def test_the_rings_factor_is_written_once() -> None:
    """A second copy would drift from the first: what is predicted, counted and reported comes from one place."""
    root = Path(farandole.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(_FACTOR.search(line) for line in path.read_text().splitlines())
    }
    assert found == {"core/link.py"}


def test_of_exchanges_that_take_as_long_whatever_they_send_all_is_latency() -> None:
    # A little less for more bytes, as noise has it: no rate explains that, and the rounds alone do.
    assert fit_link([128, 4096, 128, 4096], [1, 1, 2, 2], [0.0011, 0.0009, 0.0021, 0.0019]) == LinkModel(
        math.inf, 0.001
    )
    assert communication_seconds(10**9, math.inf, 3, 0.001) == 0.003
    # And the other way round: large ones of no latency.
    link = fit_link([1e6, 4e6], [2, 4], [0.0099, 0.0401])
    assert link is not None
    assert link.latency_seconds == 0.0
    assert link.bytes_per_second == pytest.approx(1e8, rel=0.01)

"""Waits and wires, from rows alone: whom a rank waits for, and when something is on the wire."""

from __future__ import annotations

import pytest

from farandole.core.vocabulary.events import BACKWARD, BucketTimes, Phase
from farandole.observe.figures.step_parts import WireTime, split_rows, split_waits, waits_of, wires_of
from farandole.observe.records.rows import ExchangeRow, StepRow


def bucket(launch: float, begin: float, end: float) -> BucketTimes:
    return BucketTimes(8, 8, launch, launch, launch, begin, end)


def row(backward_end: float, wait: tuple[float, float], *buckets: BucketTimes) -> StepRow:
    launches = [each.launch_seconds for each in buckets]
    exchange = ExchangeRow(launches, *wait, 8, buckets)
    return StepRow(1, 0.0, 2.0, 0.0, 4, [exchange], phases=(Phase(BACKWARD, 0.1, backward_end),))


EARLY = row(0.5, (0.5, 1.3), bucket(0.2, 0.2, 0.9), bucket(0.5, 0.9, 1.3))
LATE = row(1.0, (1.0, 1.3), bucket(0.6, 0.7, 0.9), bucket(1.0, 1.1, 1.3))
"""Rank 1 launches its buckets at 0.6 and 1.0, and its turn comes a tenth of a second later."""


def test_a_bucket_is_on_the_wire_once_every_rank_sends_it() -> None:
    (wire,) = wires_of([EARLY, LATE], one_clock=True)
    assert wire is not None
    assert wire.spans == [(0.7, 0.9), (1.1, 1.3)]
    assert wire.busy_seconds == pytest.approx(0.4)
    assert wire.serialized_seconds == pytest.approx([0.2, 0.2])
    assert wire.computed == 1.0
    assert wire.hidden_seconds == pytest.approx(0.2)


def test_where_clocks_are_apart_the_rank_that_waited_least_tells() -> None:
    (wire,) = wires_of([EARLY, LATE], one_clock=False)
    assert wire is not None
    assert wire.busy_seconds == pytest.approx(0.4)
    assert split_waits([waits_of(EARLY), waits_of(LATE)], one_clock=False) == [
        pytest.approx((0.5, 0.3)), pytest.approx((0.0, 0.3))
    ]  # fmt: skip


def test_buckets_that_overlap_take_their_turns() -> None:
    (wire,) = wires_of([row(1.0, (1.0, 1.3), bucket(0.5, 0.5, 0.9), bucket(0.6, 0.6, 1.3))], one_clock=True)
    assert wire is not None
    assert wire.serialized_seconds == pytest.approx([0.4, 0.4])
    assert wire.busy_seconds == pytest.approx(0.8)


def test_exchanges_that_do_not_match_are_not_reckoned_with() -> None:
    assert wires_of([EARLY, row(1.0, (1.0, 1.3), bucket(0.6, 0.7, 0.9))], one_clock=True) == [None]
    assert wires_of([], one_clock=True) == []


def test_a_wait_that_was_seen_to_be_short_is_short() -> None:
    # The last sum came while this rank still computed: it waited 25 microseconds, and that is all.
    seen = row(1.0, (1.0, 1.000025), bucket(0.5, 0.6, 0.99))
    assert split_rows([[seen]], one_clock=True) == [[pytest.approx((0.0, 25e-6))]]
    # Nobody saw a wait: backward waited itself.
    unseen = row(1.0, (1.0, 1.0), bucket(0.5, 0.6, 0.99))
    assert split_rows([[unseen]], one_clock=True) == [[pytest.approx((0.0, 0.49))]]


def test_buckets_that_leave_before_the_ones_before_them_have_arrived() -> None:
    spans = [(0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (5.0, 6.0)]
    assert WireTime(spans, 1.0).shares_wire == [False, True, True, False]

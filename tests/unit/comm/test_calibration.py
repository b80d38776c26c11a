"""What is learned from measured steps, and what a choice makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from farandole.comm.autotune.autotuner import choose
from farandole.comm.autotune.profile import LEAST_STEPS, Calibration, is_same_link, ratio_of
from tests.unit.comm.test_choice import link, predict, situation


def test_nothing_is_corrected_before_something_was_measured() -> None:
    learned = Calibration()
    assert not learned
    assert learned.ratio("int4") == 1.0


def test_what_was_not_tried_gets_the_mean_of_what_was() -> None:
    learned = Calibration()
    learned.take("int4", 0.7)
    assert learned.ratio("powersgd:rank=4") == pytest.approx(0.7)
    learned.take("int8", 0.9)
    assert learned.ratio("int4") == pytest.approx(0.7)
    assert learned.ratio("powersgd:rank=4") == pytest.approx(0.8)
    assert learned


def test_the_last_measurement_counts_within_bounds() -> None:
    learned = Calibration()
    learned.take("int4", 0.7)
    learned.take("int4", 1.3)
    assert learned.ratio("int4") == pytest.approx(1.3)
    learned.take("int4", 50.0)
    assert learned.ratio("int4") == 2.0
    learned.take("int4", 0.001)
    assert learned.ratio("int4") == 0.5


def test_one_step_that_took_long_does_not_move_what_is_learned() -> None:
    calm = ratio_of([0.1] * 9, 0.125)
    assert calm == pytest.approx(0.8)
    for late in range(9):
        steps = [0.1] * 9
        steps[late] = 30.0
        assert ratio_of(steps, 0.125) == calm


def test_the_first_step_of_a_choice_teaches_nothing_and_few_steps_neither() -> None:
    assert ratio_of([9.0, *[0.1] * (LEAST_STEPS - 2)], 0.1) == 0.0
    assert ratio_of([9.0, *[0.1] * (LEAST_STEPS - 1)], 0.1) == pytest.approx(1.0)


def test_steps_while_the_link_changed_are_told_apart() -> None:
    assert is_same_link(link(100), link(110))
    assert not is_same_link(link(1000), link(100))
    assert not is_same_link(link(100), link(1000))


def test_learned_ratios_change_the_choice() -> None:
    """The model takes the gentler of two codecs; the other one turned out to be much quicker than it says."""
    here = situation(shares=False)
    assert choose(here, link(500), lossy=True).main_codec == "int8"
    learned = Calibration()
    learned.take("int4", 0.7)
    for codec in ("none", "bf16", "int8", "powersgd:rank=4"):
        learned.take(codec, 1.1)
    again = choose(here, link(500), lossy=True, correct=learned.ratio)
    assert again.main_codec == "int4"
    assert again.seconds == pytest.approx(0.7 * predict(here, link(500), again.codecs, again.bucket_bytes))


def test_one_ratio_for_all_changes_no_codec() -> None:
    learned = Calibration()
    learned.take("int4", 0.6)
    for megabits in (10, 100, 1000, 10_000):
        raw = choose(situation(), link(megabits), lossy=True)
        again = choose(situation(), link(megabits), lossy=True, correct=learned.ratio)
        assert again.codecs == raw.codecs
        assert again.seconds == pytest.approx(0.6 * raw.seconds)


def test_shards_send_less_and_pay_for_adding_up_inside() -> None:
    """Two hosts of two ranks on one link: by shards each rank sends half as much as in a flat exchange of four."""
    flat = replace(situation(shares=False), ranks=4)
    sharded = replace(situation(shares=False), ranks=2, shards=2)
    assert predict(sharded, link(100), {}, 25 << 20) < 0.5 * predict(flat, link(100), {}, 25 << 20)
    slow_inside = replace(sharded, intra_host_seconds_per_byte=1e-7)
    assert predict(slow_inside, link(100), {}, 25 << 20) > predict(flat, link(100), {}, 25 << 20)


def test_what_adding_up_inside_costs_counts_for_every_bucket() -> None:
    sharded = replace(situation(shares=False, backward=0.01), ranks=2, shards=2)
    seconds = [
        predict(replace(sharded, intra_host_round_seconds=each), link(10_000), {}, 4 << 20)
        for each in (0.0, 0.01, 0.1)
    ]
    for before, after in pairwise(seconds):
        assert after > before + 10 * 0.005

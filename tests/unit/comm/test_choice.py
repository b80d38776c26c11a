"""The model of a step: what it predicts, and what is chosen by it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from farandole.comm.autotune.autotuner import choose
from farandole.core.bucket_plan import BucketPlan
from farandole.core.link import LinkModel, sum_seconds
from farandole.core.step_model import (
    CANDIDATES,
    CodecSpeed,
    Gradient,
    StepProfile,
    predict_step,
    sent_bytes,
)

SPEEDS = {
    "none": CodecSpeed(1e-10, 1.0),
    "bf16": CodecSpeed(6e-10, 0.5),
    "int8": CodecSpeed(8e-10, 0.254),
    "int4": CodecSpeed(1e-9, 0.129),
    "powersgd:rank=4": CodecSpeed(7e-10, 0.02, rounds=4),
}


def situation(
    *, count: int = 24, nbytes: int = 4 << 20, backward: float = 0.5, shares: bool = True
) -> StepProfile:
    """Return a model of `count` equal square matrices and as many biases."""
    side = int((nbytes / 4) ** 0.5)
    gradients = []
    for i in range(count):
        moment = backward * (i + 1) / count
        gradients.append(Gradient(f"layer{i}.weight", nbytes, moment, side, side, True, True))
        gradients.append(Gradient(f"layer{i}.bias", 4 * side, moment, side, 1, False, False))
    return StepProfile(gradients, 0.25, backward, 2, shares, SPEEDS)


def predict(profile: StepProfile, link: LinkModel, codecs: Mapping[str, str], bucket_bytes: int) -> float:
    return predict_step(profile, link, BucketPlan(codecs, bucket_bytes)).seconds


def link(megabits: float) -> LinkModel:
    return LinkModel(megabits * 1e6 / 8, 3e-4, 1e-9)


def test_a_slow_link_is_what_a_step_takes() -> None:
    plain = situation()
    total = sum(gradient.nbytes for gradient in plain.gradients)
    seconds = predict(plain, link(100), {}, 25 << 20)
    bound = total / (100e6 / 8)
    assert bound < seconds < 1.2 * (bound + 0.25 + 0.5 + 0.2)


def test_a_fast_link_is_hidden_behind_backward() -> None:
    plain = situation(shares=False)
    assert predict(plain, link(100_000), {}, 4 << 20) == pytest.approx(0.75, rel=0.05)


def test_codecs_take_time_from_a_core_they_share() -> None:
    codecs = {gradient.name: "int8" for gradient in situation().gradients if gradient.can_be_coded}
    apart = predict(situation(shares=False), link(100_000), codecs, 4 << 20)
    shared = predict(situation(shares=True), link(100_000), codecs, 4 << 20)
    assert shared > apart + 0.5 * 24 * (4 << 20) * SPEEDS["int8"].seconds_per_byte


def test_nothing_lossy_is_chosen_unless_allowed() -> None:
    choice = choose(situation(), link(50), lossy=False)
    assert set(choice.codecs.values()) == {"none"}
    assert choice.main_codec == "none"


def test_none_is_chosen_where_compute_rules() -> None:
    assert choose(situation(backward=20), link(40_000), lossy=True).main_codec == "none"


@pytest.mark.parametrize("megabits", [10, 50, 200])
def test_a_slow_link_gets_the_strongest_codec(megabits: float) -> None:
    choice = choose(situation(), link(megabits), lossy=True)
    assert choice.main_codec == "powersgd:rank=4"
    assert choice.seconds < predict(situation(), link(megabits), {}, 25 << 20) / 2


def test_slower_links_never_get_gentler_codecs() -> None:
    strength = [
        CANDIDATES.index(choose(situation(backward=20), link(megabits), lossy=True).main_codec)
        for megabits in (40_000, 10_000, 4_000, 2_000, 1_000, 500, 200, 100, 50, 20, 10, 5)
    ]
    assert strength == sorted(strength)


def test_the_choice_is_at_least_as_good_as_every_uniform_one() -> None:
    here = situation()
    for megabits in (100, 300, 1000, 3000):
        choice = choose(here, link(megabits), lossy=True)
        for codec in CANDIDATES:
            codecs = {g.name: codec if g.can_be_coded else "none" for g in here.gradients}
            for bucket_bytes in (4 << 20, 25 << 20):
                assert choice.seconds <= 1.04 * predict(here, link(megabits), codecs, bucket_bytes)


def test_small_parameters_stay_uncompressed() -> None:
    choice = choose(situation(), link(20), lossy=True)
    assert all(choice.codecs[g.name] == "none" for g in situation().gradients if not g.can_be_coded)


def test_where_low_rank_is_impossible_int8_stands_in() -> None:
    here = situation()
    wide = [
        Gradient(g.name, g.nbytes, g.ready_seconds, g.rows, g.columns, g.can_be_coded, g.name != "layer3.weight")
        for g in here.gradients
    ]
    choice = choose(StepProfile(wide, 0.25, 0.5, 2, True, SPEEDS), link(10), lossy=True)
    assert choice.codecs["layer3.weight"] in ("int8", "int4", "bf16")


def test_bytes_of_a_low_rank_gradient() -> None:
    gradient = Gradient("w", 4 * 512 * 256, 0.1, 512, 256, True, True)
    assert sent_bytes(gradient, "powersgd:rank=4", SPEEDS["powersgd:rank=4"], 2) == 4 * 4 * (512 + 256)
    assert sent_bytes(gradient, "int8", SPEEDS["int8"], 4) == pytest.approx(1.5 * gradient.nbytes * 0.254)


def test_doubling_is_for_many_ranks_and_few_bytes() -> None:
    """A round among N ranks costs a call for each of N - 1 messages, a round of pairs one."""

    def cheapest(ranks: int, nbytes: int) -> str:
        seconds = sum_seconds(LinkModel(125e6, 1e-4 + 1e-5 * (ranks - 1), 0.0, pair_seconds=1.1e-4), ranks, nbytes)
        return min(seconds, key=lambda kind: seconds[kind])

    assert cheapest(2, 100) == "direct"
    assert cheapest(8, 100) == "direct"
    assert cheapest(256, 100) == "doubling"
    assert cheapest(64, 8000) == "doubling"
    assert cheapest(8, 1_000_000) == "parts"
    assert cheapest(256, 10_000_000) == "parts"


def test_a_link_without_a_measured_pair_never_doubles_when_latency_rules() -> None:
    for ranks in (2, 4, 16, 256):
        seconds = sum_seconds(LinkModel(1e9, 1e-3, 0.0), ranks, 4)
        assert seconds["doubling"] >= seconds["direct"]

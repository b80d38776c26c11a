"""Memory by category: closed forms of ZeRO (Rajbhandari et al. 2020, section 5), and what would make it fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from farandole.plan.memory import (
    PRECISIONS,
    RECOMPUTE,
    STAGES,
    ActivationFacts,
    ModelFacts,
    Moment,
    OptimizerFacts,
    Setting,
    WeightFacts,
    gathered_in_16_bits,
    memory_of,
)
from farandole.plan.memory_page import RANKS, Choice, least_possible, remedies, rows_of, smallest_of

ELEMENTS = 7_500_000_000
BLOCK, OUTSIDE, BUCKET = 4 * 200_000_000, 4 * 260_000_000, 4 * 2**20
WEIGHTS = WeightFacts(
    weight_bytes=4 * ELEMENTS,
    buffer_bytes=1000,
    trainable_bytes=4 * ELEMENTS,
    trainable_elements=ELEMENTS,
    trainable_tensors=300,
    largest_tensor_bytes=4 * 130_000_000,
    outside_blocks_bytes=OUTSIDE,
    largest_block_bytes=BLOCK,
)
ADAM = OptimizerFacts(8.0, 4.0, 8.0, updates_at_once=False)
HALF = replace(
    WEIGHTS,
    weight_bytes=2 * ELEMENTS,
    trainable_bytes=2 * ELEMENTS,
    largest_tensor_bytes=2 * 130_000_000,
    outside_blocks_bytes=OUTSIDE // 2,
    largest_block_bytes=BLOCK // 2,
)
FACTS = ModelFacts(
    weights={"fp32": WEIGHTS, "bf16": WEIGHTS, "bf16-weights": HALF},
    optimizer={"fp32": ADAM, "bf16": ADAM, "bf16-weights": OptimizerFacts(4.0, 4.0, 4.0, updates_at_once=False)},
    activations={
        (precision, recompute): ActivationFacts(
            saved_bytes=round(40e9 / (1 + (precision != "fp32")) / (1 + 9 * (recompute == "blocks"))),
            weight_copy_bytes=0,
            peak_bytes=round(42e9 / (1 + (precision != "fp32")) / (1 + 9 * (recompute == "blocks"))),
        )
        for precision in PRECISIONS
        for recompute in RECOMPUTE
    },
)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_stage_divides_one_category_more(ranks: int) -> None:
    whole, state = 4 * ELEMENTS, 8 * ELEMENTS + 4 * 300
    full = OUTSIDE + 2 * BLOCK if ranks > 1 else 0
    in_flight = 2 * 4 * 130_000_000 if ranks > 1 else 0  # of gradients, and as much of parameters
    expected = {
        "0": (whole, whole, state),
        "1": (whole + in_flight, whole, state / ranks),
        "2": (whole + in_flight, whole / ranks + in_flight, state / ranks),
        "3": (whole / ranks + full, whole / ranks + full, state / ranks),
    }
    for stage, (weights, gradients, optimizer) in expected.items():
        found = memory_of(FACTS, Setting(stage, "fp32", "none", ranks))
        assert found.weights_bytes == round(weights) + 1000, f"stage {stage}: shards, and buffers whole"
        assert found.gradients_bytes == round(gradients), f"stage {stage}: gradients"
        assert found.optimizer_bytes == round(optimizer), f"stage {stage}: optimizer"
        assert found.activations_bytes == 40_000_000_000, f"stage {stage}: activations do not depend on the stage"


def test_small_buckets_have_a_region_more() -> None:
    """As measured of the training in docs/fit/memory.md: three buckets of 4 MiB, and two chunks of parameters."""
    facts = replace(
        FACTS.weights["fp32"], weight_bytes=102_000_000, trainable_bytes=102_000_000, largest_tensor_bytes=BUCKET,
        buffer_bytes=0,
    )  # fmt: skip
    found = memory_of(replace(FACTS, weights={"fp32": facts}), Setting("2", "fp32", "none", 2))
    assert found.gradients_bytes == 51_000_000 + 3 * BUCKET
    assert found.weights_bytes == 102_000_000 + 2 * BUCKET


def test_hybrid_shards_inside_a_host() -> None:
    for ranks in RANKS:
        hybrid = memory_of(FACTS, Setting("hybrid", "fp32", "none", ranks), ranks_per_host=4)
        inside = memory_of(FACTS, Setting("3", "fp32", "none", min(ranks, 4)))
        assert hybrid == inside, f"{ranks} ranks: as stage 3 on the ranks of one host"


def test_a_small_model_fits_into_buckets() -> None:
    small = replace(WEIGHTS, trainable_bytes=1000, trainable_elements=250, largest_tensor_bytes=400)
    facts = replace(FACTS, weights={"fp32": small})
    found = memory_of(facts, Setting("2", "fp32", "none", 4), bucket_bytes=BUCKET)
    assert found.gradients_bytes == 250 + 3 * 1000, "a shard, and regions no larger than all gradients"


def test_the_optimizers_step_may_be_the_largest_moment() -> None:
    none = replace(FACTS, activations={("fp32", "none"): ActivationFacts(100, 0, 200)})
    found = memory_of(none, Setting("0", "fp32", "none", 1))
    assert found.temporary_bytes == 8 * 130_000_000 - 100, "temporaries of the largest parameter, one at a time"
    at_once = replace(none, optimizer={"fp32": replace(ADAM, updates_at_once=True)})
    found = memory_of(at_once, Setting("0", "fp32", "none", 1))
    assert found.temporary_bytes == 8 * ELEMENTS - 100, "temporaries of all parameters"


def test_converted_weights_do_not_grow_with_the_batch() -> None:
    facts = ActivationFacts(saved_bytes=150, weight_copy_bytes=50, peak_bytes=250)
    larger = facts.scaled(1.0, 3.0, 3.0)
    assert (larger.saved_bytes, larger.weight_copy_bytes, larger.peak_bytes) == (50 + 300, 50, 50 + 600)


def test_with_another_batch_another_moment_is_the_highest() -> None:
    """One has all weights that autocast converted, another has the most of what grows."""
    facts = ActivationFacts(150, 50, 250, (Moment(150, 100), Moment(150, 100), Moment(20, 200)))
    assert facts.scaled(1.0, 1.0, 1.0).peak_bytes == 250
    assert facts.scaled(1.0, 10.0, 10.0).peak_bytes == 20 + 2000, "150 + 1000 are less"
    assert facts.scaled(0.5, 1.0, 1.0).peak_bytes == 10 + 200, "of half of the weights"
    kept = facts.scaled(1.0, 3.0, 1.0)
    assert kept.saved_bytes == 50 + 3 * 100, "three passes at once share what autocast converted"
    assert kept.peak_bytes == max(150 + 3 * 100, 20 + 3 * 100 + 100)
    assert facts.scaled(0.5, 1.0, 1.0, least_fixed=40).peak_bytes == 20 + 200, "no more than the whole has"


def test_stage_3_in_bf16_gathers_the_matrices_of_blocks_in_2_bytes() -> None:
    """Autocast casts none of them then: they were copies of the whole model."""
    cast = replace(WEIGHTS, blocks_cast_bytes=60, largest_block_cast_bytes=BLOCK // 2 - 100)
    whole = ActivationFacts(1000, 80, 1500, (Moment(90, 1410),))
    again = ActivationFacts(300, 20, BLOCK, (Moment(BLOCK // 2 + 20, BLOCK // 2 - 20),))
    facts = ModelFacts({"bf16": cast}, {"bf16": ADAM}, {("bf16", "none"): whole, ("bf16", "blocks"): again})
    before, found = (memory_of(facts, Setting(stage, "bf16", "none", 8)) for stage in "23")
    assert (before.activations_bytes, found.activations_bytes) == (1000, 1000 - 60)
    assert found.weights_bytes == 4 * ELEMENTS // 8 + 1000 + OUTSIDE + 2 * (BLOCK // 2 + 100)
    assert gathered_in_16_bits(facts).activations["bf16", "blocks"].peak_bytes == BLOCK - (BLOCK // 2 - 100)
    assert gathered_in_16_bits(gathered_in_16_bits(facts)) == gathered_in_16_bits(facts)
    assert memory_of(facts, Setting("3", "bf16", "none", 1)).activations_bytes == 1000, "nothing is sharded"


def test_unknown_activations_are_left_out() -> None:
    found = memory_of(replace(FACTS, activations={}), Setting("0", "fp32", "none", 1))
    assert found.activations_bytes is None
    assert found.temporary_bytes is None
    assert found.total_bytes == found.state_bytes


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("precisions", [PRECISIONS, ("fp32",)])
def test_remedies_fit(ranks: int, precisions: tuple[str, ...]) -> None:
    choice = Choice(precisions=precisions)
    smallest = smallest_of(rows_of(partial(memory_of, FACTS), choice, [ranks]))
    for limit in (10, 12, 15, 20, 40, 60, 100):
        limit_bytes = limit * 10**9
        if smallest.fits(limit_bytes):
            continue
        found = remedies(FACTS, smallest.setting, limit_bytes, choice)
        assert found, f"{limit} GB are enough with many ranks"
        assert all(remedy.total_bytes <= limit_bytes for remedy in found), found


def test_more_ranks_are_the_fewest_that_fit() -> None:
    setting = Setting("0", "bf16-weights", "blocks", 1)
    texts = [remedy.text for remedy in remedies(FACTS, setting, 20 * 10**9, Choice())]
    assert texts == ["ZeRO stage 3 on 4 ranks"]
    before, after = (memory_of(FACTS, setting._replace(stage="3", ranks=ranks)).total_bytes for ranks in (2, 4))
    assert before > 20 * 10**9 >= after


def test_nothing_makes_it_fit() -> None:
    setting = Setting("3", "fp32", "none", 8)
    assert remedies(FACTS, setting, 10**9, Choice()) == []
    assert least_possible(FACTS, setting, Choice()).total_bytes > 10**9


def test_rows_are_all_combinations() -> None:
    rows = rows_of(partial(memory_of, FACTS), Choice(), RANKS)
    assert len({row.setting for row in rows}) == len(STAGES) * len(PRECISIONS) * len(RECOMPUTE) * len(RANKS) == 330

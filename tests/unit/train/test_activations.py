"""One account of activations: for any batch, in blocks or by their names, on any part of a model."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from farandole.core.cluster_presets import preset_cluster
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.blocks import repeated_blocks
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import predict
from farandole.plan.memory import MemoryByCategory
from farandole.plan.profile import ModelProfile
from farandole.train.analysis import user_code
from farandole.train.analysis.analyse import analyse
from farandole.train.analysis.fake_pass import fake_mode, make_fake, run_pass
from farandole.train.analysis.user_code import recomputed
from tests.unit.train.analysed_models import Language, next_word, words

BLOCKS = 10
PLANS: tuple[dict[str, Any], ...] = (
    {}, {"zero": 3}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"context": 2},
    {"pipeline": 2, "micro_batches": 4, "pipeline_cuts": ("layers.5",)},
    {"pipeline": 2, "micro_batches": 4, "tensor": 2, "pipeline_cuts": ("layers.5",)},
)  # fmt: skip


@functools.cache
def profile_of(samples: int) -> ModelProfile:
    return analyse(lambda: Language(tied=False), lambda n=samples: words(n), loss=next_word)


@pytest.fixture(scope="module")
def language() -> ModelProfile:
    return profile_of(2)


def names_of(count: int) -> tuple[str, ...]:
    return tuple(f"layers.{number}" for number in range(count))


def held(profile: ModelProfile, samples: int = 16, **keys: Any) -> tuple[MemoryByCategory, ...]:
    """Return the memory of a plan on 8 ranks, each place in the pipeline, with `samples` in a pass."""
    plan = Plan(**keys)
    replicas = 8 // (int(plan.tensor) * int(plan.pipeline) * int(plan.context))
    batch = samples * replicas * (plan.micro_batches or 1)
    return predict(profile, preset_cluster("dgx-h100", 8), Candidate(plan, 8, batch), interval=False).memory


def passes_bytes(memory: MemoryByCategory) -> int:
    assert memory.activations_bytes is not None
    assert memory.temporary_bytes is not None
    return memory.activations_bytes + memory.temporary_bytes


@pytest.mark.full("slow")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_holds_the_same_whatever_the_example_batch_was(precision: str) -> None:
    """Converted weights and gradients on their way were multiplied by the batch."""
    for keys in ({"recompute": "none"}, {"recompute": "blocks"}, {"recompute": names_of(3)}):
        found = {
            (example, samples): passes_bytes(held(profile_of(example), samples, precision=precision, **keys)[0])
            for example in (1, 16)
            for samples in (1, 4, 32)
        }
        for (_, samples), nbytes in found.items():
            assert nbytes == pytest.approx(found[1, samples], rel=0.1), (keys, found)


@pytest.mark.gate_cases("0-fp32", "7-bf16", "10-fp32", "3-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("computed_again", [0, 3, 7, BLOCKS])
def test_it_is_what_a_pass_needs(precision: str, computed_again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over a batch sixteen times as large, with some of its blocks computed again."""
    found = held(profile_of(2), 32, precision=precision, recompute=names_of(computed_again) or "none")[0]
    monkeypatch.setattr(user_code, "repeated_blocks", lambda model: repeated_blocks(model)[:computed_again])
    with fake_mode():
        model = Language(tied=False)
        make_fake(model, "cpu", None)
        with recomputed(model, "blocks"):
            true = run_pass(model, words(32), next_word, device="cpu", precision=precision)
    assert found.activations_bytes == pytest.approx(true.saved_bytes, rel=0.02)
    assert passes_bytes(found) == pytest.approx(true.peak_bytes, rel=0.05)


@pytest.mark.parametrize("keys", PLANS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_blocks_by_name_are_blocks_and_each_name_saves(
    language: ModelProfile, keys: dict[str, Any], precision: str
) -> None:
    by_count = [
        held(language, precision=precision, recompute=names_of(count) or "none", **keys)
        for count in range(BLOCKS + 1)
    ]
    assert by_count[-1] == held(language, precision=precision, recompute="blocks", **keys)
    for place in range(len(by_count[0])):
        found = [passes_bytes(each[place]) for each in by_count]
        assert all(more <= 1.01 * less for less, more in itertools.pairwise(found)), (place, found)


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_temporaries_are_divided_as_the_model_is(language: ModelProfile, recompute: str) -> None:
    """The weights that autocast converts are those of a rank: the whole model's were among temporaries."""
    whole = passes_bytes(held(language, 1, precision="bf16", recompute=recompute)[0])
    converted = language.memory.activations["bf16", recompute].highest[1].fixed_bytes
    assert converted > 0.4 * whole, "of one sample they are much of it"
    for stages in (2, 4):
        # The block that is computed again is one on each stage, with its converted weights.
        least, most = (0, 1.3 / stages) if recompute == "none" else (0.9 * converted, 1.05)
        keys = {"pipeline": stages, "micro_batches": 1}
        for divided in held(language, 1, precision="bf16", recompute=recompute, **keys):
            assert least < passes_bytes(divided) < most * whole


def test_at_stage_3_nothing_is_gathered_where_no_rank_has_the_same_parameters(language: ModelProfile) -> None:
    """So autocast converts the weights of blocks there, as at any stage."""
    keys = {"precision": "bf16", "pipeline": 8, "micro_batches": 8}
    assert held(language, 1, zero=3, **keys) == held(language, 1, **keys)
    shared = {**keys, "pipeline": 4}
    one, other = held(language, 1, zero=3, **shared)[0], held(language, 1, **shared)[0]
    assert passes_bytes(one) < 0.7 * passes_bytes(other)


def test_micro_batches_that_are_kept_share_their_converted_weights(language: ModelProfile) -> None:
    """`fd.step` casts a weight once a step, for all of them."""
    whole = language.memory.activations["bf16", "none"]
    keys = {"precision": "bf16", "pipeline": 2, "schedule": "1f1b", "micro_batches": 4}
    first, last = held(language, 1, **keys)
    assert first.activations_bytes is not None
    assert last.activations_bytes is not None
    of_one = (whole.saved_bytes - whole.weight_copy_bytes) / 2 / 2
    assert whole.weight_copy_bytes > 2 * of_one, "they would be seen"
    assert first.activations_bytes - last.activations_bytes < 2 * of_one, "two of them, and one"

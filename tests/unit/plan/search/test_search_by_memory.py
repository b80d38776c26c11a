"""Models that only just fit: a plan is found where there is one, and none is much worse for looking wider."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from farandole.core.cluster import Cluster
from farandole.core.cluster_presets import preset_cluster
from farandole.core.schedule import build_schedule
from farandole.core.schedule_simulation import in_flight
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.rules import SCHEDULES, chunks_of
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import predict
from farandole.plan.cost.stages import short_schedule
from farandole.plan.profile import ModelProfile
from farandole.plan.search.bounds import Bounds, Room, kept_at_ends
from farandole.plan.search.decide import search
from farandole.plan.search.reasons import in_words
from farandole.plan.search.result import Goal, PredictedPlan, SearchRequest
from farandole.plan.search.search import NEAR, SearchQuestion, best_of_each, find
from farandole.plan.search.space import SearchLayout, Space

from .models import make_cluster, make_profile, predict_plainly


@dataclass
class Case:
    """A model on a cluster where not every plan fits."""

    profile: ModelProfile
    cluster: Cluster
    request: SearchRequest

    def seconds(self, **changed: Any) -> float:
        """Return the seconds of the plan that a search finds; infinite where it finds none."""
        best = search(self.profile, self.cluster, replace(self.request, **changed)).best
        return float("inf") if best is None else best.prediction.seconds


def make_case(seed: int) -> Case:
    """Return a case whose limit is a little more than the least plan needs, or some times that."""
    draw = random.Random(seed)
    ranks = draw.choice([8, 16])
    profile = make_profile(blocks=draw.choice([6, 8, 12]), width=draw.choice([512, 1024, 2048]))
    cluster = make_cluster(ranks=ranks, inside=draw.choice([2, 4, 8]), rate=draw.choice([1e9, 1e10, 1e11]))
    effort = draw.choice([600, 1500, 3000])
    request = SearchRequest(ranks, ranks * draw.choice([4, 8, 16]), precisions=("fp32", "bf16"), effort=effort)
    least = replace(request, goal="memory", effort=100_000)
    best = find(SearchQuestion(profile, cluster, least, partial(predict, interval=False), 2**62)).best("memory")
    assert best is not None, "no plan at all"
    limit_bytes = round(best.prediction.peak_bytes * draw.choice([1.01, 1.1, 1.5, 3.0]))
    return Case(profile, cluster, replace(request, memory_bytes=limit_bytes))


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(24))
def test_looking_wider_is_never_worse(seed: int) -> None:
    """What fits is found; keys that are fixed, precisions left out and less effort find nothing better."""
    case = make_case(seed)
    free = case.seconds()
    assert free < float("inf"), "a plan fits, and was not found"
    fixed: list[dict[str, Any]] = [
        {"tensor": 1, "pipeline": 1}, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 4, "schedule": "1f1b"},
        {"zero": 3}, {"recompute": "blocks"}, {"tensor": 2, "sequence_parallel": False},
    ]  # fmt: skip
    others = {str(keys): case.seconds(fixed=keys) for keys in fixed}
    others |= {name: case.seconds(precisions=(name,)) for name in case.request.precisions}
    others["less effort"] = case.seconds(effort=case.request.effort // 3)
    best = min(others, key=lambda name: others[name])
    assert free <= others[best] * (1 + NEAR), f"{free / others[best] - 1:.1%} slower than with {best}: {others}"


@pytest.mark.full("further")
@pytest.mark.parametrize("saved", [500.0, 2000.0])
def test_a_model_that_fits_by_few_plans_is_not_said_to_be_too_large(saved: float) -> None:
    """64 billion parameters and long sequences on 64 GPUs of 84 GB: fast plans are too large."""
    profile, cluster = make_profile(blocks=80, width=8192, saved=saved), preset_cluster("dgx-h100", 64)
    answer = search(profile, cluster, SearchRequest(64, 512, effort=600))
    assert answer.best is not None, f"{answer.advice}"
    assert answer.best.prediction.peak_bytes <= cluster.device.memory_bytes.value


@pytest.mark.parametrize(
    ("tokens", "fixed", "divided"),
    [
        (128, {}, True),
        (0, {}, False),
        (127, {}, False),
        (126, {"context": 2}, False),
        (128, {"context": 2}, True),
        (128, {"sequence_parallel": False}, False),
        (0, {"sequence_parallel": True}, True),
    ],
)
def test_tokens_are_divided_wherever_they_can_be(tokens: int, fixed: dict[str, Any], divided: bool) -> None:
    """By the model, by the length of its sequences, and as the user says; the goal is memory, which it saves."""
    profile = make_profile(blocks=4)
    units = [
        replace(each, tensor=replace(each.tensor, tokens=tokens)) if each.tensor else each
        for each in profile.units
    ]
    fixed = {"tensor": 2, "zero": 0, "pipeline": 1, "recompute": "none", "accumulate": 1, **fixed}
    request = SearchRequest(4, 16, goal="memory", fixed=fixed, effort=300)
    answer = search(replace(profile, units=tuple(units)), make_cluster(ranks=4), request)
    assert answer.best is not None, f"{answer.advice}"
    assert answer.best.candidate.plan.sequence_parallel == divided
    assert ("tokens divided" in in_words(answer.best.candidate)) == divided
    said = " ".join(answer.best.prediction.warnings)
    ranks = 2 * fixed.get("context", 1)
    assert (f"needs batches whose tokens are a multiple of {ranks}: pad" in said) == divided, said
    assert ("does not divide" in said) == (tokens % ranks > 0), said


def test_tokens_that_do_not_divide_are_said_where_they_are_asked_for() -> None:
    profile = make_profile(blocks=4)
    units = [
        replace(each, tensor=replace(each.tensor, tokens=127)) if each.tensor else each for each in profile.units
    ]
    request = SearchRequest(4, 16, fixed={"tensor": 2, "sequence_parallel": True})
    with pytest.raises(PlanError, match=r"tensor x context = 2 does not divide 127 tokens of layers.0: pad them"):
        search(replace(profile, units=tuple(units)), make_cluster(ranks=4), request)


def test_plans_that_only_buckets_tell_apart_are_refined_once() -> None:
    """Else the many of the best plan keep from being refined what is a little too large, and faster then."""
    case = make_profile(blocks=4), make_cluster(ranks=8)
    options = []
    families: dict[str, dict[str, Any]] = {
        "tensor": {"tensor": 2},
        "pipeline": {"pipeline": 2, "micro_batches": 4},
    }
    for family, degrees in families.items():
        for nbytes in (1 << 18, 1 << 22, 1 << 26):
            candidate = Candidate(Plan(**degrees, bucket_bytes=nbytes, first_bucket_bytes=nbytes), 8, 64)
            options.append(PredictedPlan(family, candidate, predict(*case, candidate, interval=False)))
    by_time = sorted(options, key=lambda each: each.prediction.seconds)
    fastest = {each.family: each for each in reversed(by_time)}
    expected = sorted(fastest.values(), key=lambda each: each.prediction.seconds)
    assert best_of_each(options, "throughput") == expected, "the best of each, the best first"


@pytest.mark.full("slow")
def test_neighbours_of_the_best_plans_are_looked_at() -> None:
    """A short search finds what a long one finds; by the order of layouts alone it does not."""
    case = Case(
        make_profile(blocks=8, width=1024), make_cluster(ranks=16, inside=4),
        SearchRequest(16, 128, precisions=("fp32", "bf16"), effort=400, memory_bytes=500_000_000),
    )  # fmt: skip
    assert case.seconds() <= case.seconds(effort=2000) * (1 + NEAR)


@pytest.mark.parametrize(
    ("experts", "fixed"),
    [(0, {}), (4, {"tensor": 1}), (0, {"recompute": ("layers.0", "layers.1"), "tensor": 1}),
     (0, {"offload": "disk", "offload_directory": "states"})],
)  # fmt: skip
def test_screens_are_near_to_predictions(experts: int, fixed: dict[str, Any]) -> None:
    """The memory by which layouts are ordered is that of predictions, but for some tens of percent."""
    profile, cluster = make_profile(blocks=8, experts=experts), make_cluster(ranks=8, inside=4)
    bounds = Bounds(profile, cluster, fixed)
    ratios = []
    for base, layouts in Space(profile, SearchRequest(8, 64, fixed=fixed, precisions=("fp32", "bf16")), cluster):
        some = layouts[:: max(1, len(layouts) // 3)]
        for layout, floor in zip(some, bounds.of(base, some), strict=True):
            peak_bytes = predict(profile, cluster, layout.to_candidate(fixed), interval=False).peak_bytes
            ratios.append(floor.screen_bytes / peak_bytes)
    ratios.sort()
    assert len(ratios) > 10, f"only {len(ratios)} layouts"
    low, middle, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.05, 0.5, 0.95))
    assert low > 0.7, f"{low} to {high}"
    assert 0.95 < middle < 1.2, f"{middle}"
    assert high < 1.6, f"{low} to {high}"


@pytest.mark.parametrize(("goal", "least", "most"), [("throughput", 0.0, 0.3), ("memory", 1.0, 1.1)])
def test_memory_is_estimated_where_the_order_needs_it(
    goal: Goal, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of layouts on many ranks most are never near the front."""
    asked, estimate = set(), Room.of

    def counted(room: Room, layout: SearchLayout) -> int:
        asked.add(layout)
        return estimate(room, layout)

    monkeypatch.setattr(Room, "of", counted)
    profile, cluster = make_profile(blocks=8, width=1024), make_cluster(ranks=64, inside=8)
    request = SearchRequest(64, 512, goal=goal, effort=200)
    found = find(SearchQuestion(profile, cluster, request, predict_plainly, 500_000_000))
    may_fit = found.layouts - found.too_large
    assert found.left > 1000, f"{found.left}"
    assert least <= len(asked) / may_fit <= most, f"{len(asked)} of {may_fit}"


def test_what_is_said_not_to_fit_is_the_least_of_its_kind() -> None:
    """By what is predicted of all that is told apart: schedules, recomputation and precision too."""
    profile, cluster = make_profile(blocks=8, width=1024), make_cluster(ranks=8, inside=8)
    request = SearchRequest(8, 64, precisions=("bf16", "fp32"))
    found = find(SearchQuestion(profile, cluster, request, predict, 2_000_000))
    bounds, least = Bounds(profile, cluster, {}), dict[str, int]()
    for base, layouts in Space(profile, request, cluster):
        for floor in bounds.of(base, layouts):
            least[base.family] = min(floor.screen_bytes, least.get(base.family, floor.screen_bytes))
    over = {each.family: each.prediction.peak_bytes for each in found.over}
    assert len(over) > 10
    for family, nbytes in over.items():
        assert nbytes < 1.6 * least[family], f"{family}: {nbytes} and {least[family]}"
    with_pipeline = [each.candidate.plan for each in found.over if "pipeline" in each.family.split(" x ")]
    assert with_pipeline
    assert {each.schedule for each in with_pipeline} <= {"1f1b", "zb-h1", "gpipe"}, "one stage a rank keeps least"


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_kept_is_known_without_the_whole_schedule(name: str) -> None:
    """A short schedule keeps as many as a long one on each rank, and both ends follow from the numbers."""
    for ranks in range(2, 7):
        for chunks in (2, 3, 4) if name == "interleaved" else (0,):
            for micro_batches in range(1, 5 * ranks + 2):
                if name == "interleaved" and micro_batches % ranks:
                    continue
                kept = in_flight(build_schedule(name, ranks, micro_batches, chunks))
                short = short_schedule(name, ranks, micro_batches, chunks)
                assert kept == short.kept, f"{ranks} {micro_batches}"
                assert name == "gpipe" or short.schedule.micro_batches < 3 * ranks, f"{ranks} {micro_batches}"
                each = chunks_of(name, chunks)
                first, last = kept_at_ends(name, ranks, micro_batches, each)
                most = max(kept) / each if name == "zb-v" else kept[0] / each
                assert abs(first - most) < 1e-9, f"{name} {ranks} {micro_batches} {chunks}: {first} of {kept}"
                if name != "zb-v":
                    assert abs(last - kept[-1] / each) < 1e-9, (
                        f"{name} {ranks} {micro_batches} {chunks}: {last} of {kept}"
                    )


@pytest.mark.full("further")
def test_what_is_said_of_precision_and_of_long_steps() -> None:
    """A device that is much faster in bf16, where that was not asked for; and tokens that are given as samples."""
    profile, cluster = make_profile(), preset_cluster("dgx-h100", 8)

    def said(**changed: Any) -> str:
        request = SearchRequest(**{"ranks": 8, "global_batch": 64, "effort": 20, **changed})
        return " ".join(search(profile, cluster, request).warnings)

    assert "planned in fp32: NVIDIA H100-SXM 80 GB is 14.8 times as fast in bf16 (--precision fp32,bf16)" in said()
    assert "in bf16 (" not in said(precisions=("fp32", "bf16"))
    assert "in bf16 (" not in said(fixed={"precision": "fp32"})
    assert "not tokens" not in said()
    profile = make_profile(width=8192)
    assert "is unusual: a global batch counts samples, which are sequences" in said(global_batch=64 * 2**16)


def test_micro_batches_that_a_schedule_does_not_take_are_named_as_given() -> None:
    """Not by the number with which the schedule is looked at in short."""
    plan = Plan(pipeline=4, schedule="interleaved", micro_batches=30)
    with pytest.raises(PlanError, match="micro_batches = 30 is no multiple") as raised:
        predict(make_profile(), make_cluster(ranks=8), Candidate(plan, 8, 120))
    assert raised.value.remedy == "set micro_batches = 32"


@pytest.mark.parametrize("ranks", [4, 65536])
def test_ranks_that_were_not_looked_at_are_told(ranks: int) -> None:
    """Where the cluster or the request has no more ranks, that is said, and no plan is said not to be there."""
    profile, cluster = make_profile(), preset_cluster("rtx-4090", 4) if ranks == 4 else make_cluster(ranks=ranks)
    fixed = {"zero": 0, "tensor": 1, "pipeline": 1, "context": 1}
    request = SearchRequest(ranks, ranks, memory_bytes=2**21, effort=20, fixed=fixed)
    answer = search(profile, cluster, request)
    assert answer.best is None
    assert any(each.startswith("more ranks were not looked at: ") for each in answer.advice), f"{answer.advice}"

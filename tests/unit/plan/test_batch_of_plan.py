"""The batch that hides communication, by the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.core.cluster import CodecCost, Coefficient
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.batch_advice import HIDEABLE, advise_plan
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import fits, predict
from tests.unit.plan.cost.cases import cluster_of, transformer, with_tiers

PROFILE, CLUSTER = transformer(), cluster_of(8)
CODED = replace(
    CLUSTER, codecs={"int8": CodecCost(Coefficient(1e-10), 0.26), "topk": CodecCost(Coefficient(1e-9), 0.1)}
)


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(zero=2), Plan(zero=3), Plan(accumulate=2), Plan(precision="bf16"), Plan(tensor=2)]
)
def test_the_batch_that_hides_is_that_of_a_search_through_all(plan: Plan) -> None:
    advice = advise_plan(PROFILE, CLUSTER, Candidate(plan, 8, 64))
    multiple = advice.question.multiple
    assert multiple == 8 * plan.accumulate // (2 if plan.tensor == 2 else 1), "what a batch has to divide into"

    def share(batch: int) -> float:
        found = predict(PROFILE, CLUSTER, Candidate(plan, 8, batch))
        return sum(found.terms.get(name, 0.0) for name in HIDEABLE) / found.seconds

    expected = next(batch for batch in range(multiple, 10**5, multiple) if share(batch) <= 0.05)
    assert advice.hiding == {"none": expected}, "bisection finds what looking at all batches finds"


def test_a_faster_link_hides_behind_a_smaller_batch() -> None:
    batches = [
        advise_plan(PROFILE, with_tiers(CLUSTER, speed), Candidate(Plan(), 8, 64)).hiding["none"] or 0
        for speed in (0.5, 1.0, 4.0)
    ]
    assert batches[0] > batches[1] > batches[2] > 0, f"batches {batches} for faster and faster links"


def test_codecs_are_looked_at_when_they_may_be_lossy() -> None:
    candidate = Candidate(Plan(), 8, 64)
    exact = advise_plan(PROFILE, CODED, candidate, critical_batch=500.0)
    assert list(exact.hiding) == ["none"], "nothing lossy without asking"
    advice = advise_plan(PROFILE, CODED, candidate, critical_batch=500.0, allow_lossy=True)
    assert list(advice.hiding)[:2] == ["none", "int8"], "those of the cluster"
    assert 0 < (advice.hiding["int8"] or 0) < (advice.hiding["none"] or 0), "fewer bytes hide behind less"
    chosen = [getattr(each.recommended, "global_batch", 0) for each in (advice, exact)]
    assert chosen[0] == chosen[1] > 0, "what loses nothing is recommended as before"
    sharded = advise_plan(PROFILE, CODED, Candidate(Plan(zero=3), 8, 64), allow_lossy=True)
    assert list(sharded.hiding) == ["none", "int8"], "a plan that cannot have the codec is not looked at with it"


def test_on_accelerators_codecs_are_looked_at_where_they_were_measured() -> None:
    guessed = replace(CODED, fingerprint={"backend": "nccl"})
    costs = {
        name: replace(cost, seconds_per_byte=Coefficient(1e-12, "measured")) for name, cost in CODED.codecs.items()
    }
    measured = replace(guessed, codecs=costs)
    looked_at = [
        list(advise_plan(PROFILE, cluster, Candidate(Plan(zero=zero), 8, 64), allow_lossy=True).hiding)[:2]
        for cluster, zero in ((guessed, 0), (measured, 0), (measured, 3))
    ]
    assert looked_at == [["none"], ["none", "int8"], ["none"]]


def test_what_does_not_fit_is_not_in_the_table() -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=Coefficient(30e6)))
    advice = advise_plan(PROFILE, small, Candidate(Plan(), 8, 64), critical_batch=1e6)
    largest = max(point.global_batch for point in advice.points)
    assert fits(predict(PROFILE, small, Candidate(Plan(), 8, largest)), small), "all points fit"
    assert largest < 1e6, "the critical batch does not"
    assert advice.hiding["none"] is None or advice.hiding["none"] <= largest, "and what hides fits, too"


def test_bad_input_is_refused() -> None:
    with pytest.raises(PlanError, match="global_batch = 63 does not divide"):
        advise_plan(PROFILE, CLUSTER, Candidate(Plan(), 8, 63))
    with pytest.raises(PlanError, match="tensor"):
        advise_plan(PROFILE, CLUSTER, Candidate(Plan(tensor=3), 8, 64))
    with pytest.raises(ConfigError, match="critical batch 0"):
        advise_plan(PROFILE, CLUSTER, Candidate(Plan(), 8, 64), critical_batch=0.0)

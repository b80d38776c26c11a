"""1F1B without a flush between batches: valid, without idle ranks, drawn and priced."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from farandole.cli.main import run
from farandole.core.schedule import build_schedule
from farandole.core.schedule_simulation import Action, BatchesInARow, StageTimes, in_flight, simulate
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import predict
from farandole.plan.search.result import SearchRequest
from tests.unit.plan.cost.cases import cluster_of, transformer


def test_batches_in_a_row_are_one_long_1f1b() -> None:
    for ranks, more, batches in itertools.product((1, 2, 3, 4, 7), (0, 1, 4), (1, 2, 3)):
        rows = BatchesInARow(ranks, ranks + more)
        schedule = rows.schedule(batches)
        assert schedule == build_schedule("1f1b", ranks, batches * (ranks + more))
        assert in_flight(schedule)[0] == min(ranks, schedule.micro_batches), "as many activations as 1f1b keeps"
        for rank, actions in enumerate(schedule.actions):
            positions = [rows.position(rank, each) for each in actions]
            assert positions == sorted(set(positions)), f"{ranks} ranks, rank {rank}"


def test_two_versions_are_enough() -> None:
    """Batch t - 1 ends within step t on every rank, so that no pass needs a third version."""
    for ranks, more in itertools.product((2, 3, 4, 7), (0, 1, 4)):
        rows = BatchesInARow(ranks, ranks + more)
        for rank in range(ranks):
            done = {each for number in (0, 1) for each in rows.batch(number)[rank] if each.kind == "B"}
            assert {Action(rank, "B", each) for each in range(ranks + more)} <= done, f"rank {rank} of {ranks}"
    with pytest.raises(PlanError, match="two versions of the weights are not enough"):
        BatchesInARow(4, 3)


def test_no_rank_waits_once_the_pipeline_is_full() -> None:
    for ranks, times in itertools.product((2, 4, 8), ((1.0, 1.0, 1.0), (1.0, 1.4, 0.6))):
        rows, stages = BatchesInARow(ranks, 2 * ranks), [StageTimes(*times)] * ranks
        ends = [simulate(rows.schedule(batches), stages).total_seconds for batches in (1, 2, 3, 4)]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        assert steps == pytest.approx([2 * ranks * sum(times)] * 3), f"{ranks} ranks"
        assert ends[0] == pytest.approx((3 * ranks - 1) * sum(times)), (
            "the first and the last batch fill and drain"
        )


def test_it_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--draw", "--set", "pipeline=2", "--set", "weight_versions=2", "--micro-batches", "3"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "2 batches in a row of 3 micro-batches; bubble 0.0% of a step" in text, text
    assert {"F3", "B5"} <= set(text.split()), "micro-batches of the second batch"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight_versions": 3}, "weight_versions = 3, expected 1, or 2"),
        ({"weight_versions": 2}, "weight_versions = 2 with pipeline = 1"),
        ({"weight_versions": 2, "pipeline": 2, "schedule": "gpipe"}, 'with schedule = "gpipe"'),
        ({"weight_versions": 2, "pipeline": 2, "schedule": "zb-h1"}, 'with schedule = "zb-h1"'),
        ({"weight_versions": 2, "pipeline": 4, "micro_batches": 3}, "micro_batches = 3 and pipeline = 4"),
    ],
)
def test_keys_that_contradict_it_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**keys)


@pytest.mark.parametrize("degree", ["shard", "tensor", "expert", "context"])
def test_other_degrees_are_refused(degree: str) -> None:
    keys: dict[str, Any] = {degree: 2, **({"zero": 3} if degree == "shard" else {})}
    with pytest.raises(PlanError, match=f"weight_versions = 2 with {degree} = 2"):
        Plan(pipeline=2, weight_versions=2, **keys)


def test_it_is_priced_and_never_proposed() -> None:
    profile, cluster = transformer(layers=8, hidden=128, sequence=64, heads=8), cluster_of(4, 4)

    def candidate(versions: int) -> Candidate:
        return Candidate(Plan(pipeline=4, micro_batches=8, weight_versions=versions), 4, 64)

    one, two = (predict(profile, cluster, candidate(versions)) for versions in (1, 2))
    assert one.terms["bubble"] > 0.1 * one.seconds
    assert two.terms.get("bubble", 0.0) == pytest.approx(0.0, abs=1e-9 * two.seconds)
    assert two.seconds < one.seconds - 0.9 * one.terms["bubble"]
    for place, (before, after) in enumerate(zip(one.memory, two.memory, strict=True)):
        more = after.total_bytes - before.total_bytes
        assert more == (2 if place < 3 else 1) * before.weights_bytes, "a version of the weights, and gradients"
    with pytest.raises(PlanError, match="changes what is trained"):
        SearchRequest(4, 64, fixed={"weight_versions": 2})

"""Pipeline schedules: built, validated, simulated, drawn; layers divided into stages."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.cli.main import run
from farandole.core.schedule import LayerCost, build_schedule, partition
from farandole.core.schedule_simulation import (
    Action,
    Schedule,
    StageTimes,
    bubble_seconds,
    draw_grid,
    in_flight,
    simulate,
    validate,
)
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.rules import SCHEDULES, chunks_of
from farandole.core.vocabulary.spec import Plan


def simulated(name: str, ranks: int, count: int, times: tuple[float, float, float], chunks: int = 0) -> float:
    schedule = build_schedule(name, ranks, count, chunks)
    each = schedule.stages // ranks
    stage = StageTimes(*(seconds / each for seconds in times))
    return simulate(schedule, [stage] * schedule.stages).bubble_seconds


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_simulated_bubble_is_that_of_the_closed_form(name: str) -> None:
    for ranks, count in ((2, 4), (4, 8), (4, 16), (8, 16), (16, 64)):
        found = simulated(name, ranks, count, (1.0, 1.0, 1.0))
        assert found == pytest.approx(bubble_seconds(name, ranks, 1.0, 1.0, 1.0), abs=1e-9), f"{ranks}, {count}"
        if name == "zb-v":
            continue
        for times in ((1.0, 1.2, 0.8), (1.0, 1.5, 0.5), (1.0, 0.9, 1.1)):
            found = simulated(name, ranks, count, times)
            assert found == pytest.approx(bubble_seconds(name, ranks, *times), abs=1e-9), f"{ranks}, {times}"
    if name == "interleaved":
        found = simulated(name, 4, 16, (1.0, 1.0, 1.0), 4)
        assert found == pytest.approx(bubble_seconds(name, 4, 1.0, 1.0, 1.0, chunks=4), abs=1e-9), "four chunks"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_valid(name: str) -> None:
    for ranks, count in itertools.product(range(1, 6), range(1, 11)):
        if name == "interleaved" and count % ranks:
            with pytest.raises(PlanError, match=f"set micro_batches = {-(-count // ranks) * ranks}"):
                build_schedule(name, ranks, count)
            continue
        schedule = build_schedule(name, ranks, count)
        validate(schedule)
        assert len(schedule.stages_of(0)) == chunks_of(name), "stages of a rank"


def test_memory_in_flight() -> None:
    kept = {name: in_flight(build_schedule(name, 4, 16)) for name in SCHEDULES}
    assert kept["gpipe"] == (16, 16, 16, 16), "all micro-batches"
    assert kept["1f1b"] == (4, 3, 2, 1), "as many as ranks follow"
    assert kept["interleaved"] == (11, 9, 7, 5), "in halves of a rank's layers"
    assert kept["zb-h1"] == (4, 4, 4, 4), "no more than 1f1b on its first rank"
    assert kept["zb-v"] == (8, 8, 8, 8), "in halves"


def test_what_is_wrong_is_named() -> None:
    good = build_schedule("1f1b", 2, 2)
    first, second = good.actions
    cases: list[tuple[Schedule, str]] = [
        (replace(good, actions=(first[1:], second)), "0F0 is missing"),
        (replace(good, actions=((*first, first[0]), second)), "rank 0 has 0F0 2 times"),
        (replace(good, actions=(first, (*second, Action(0, "F", 0)))), "stage 0 is on rank 0"),
        (replace(good, actions=(first, (*second, Action(1, "F", 9)))), "1F9, which is no action of it"),
        (replace(good, actions=(first[::-1], second)), "it deadlocks"),
        (replace(good, stage_ranks=(0, 7)), "a stage is on rank 7"),
    ]
    for schedule, message in cases:
        with pytest.raises(PlanError, match=re.escape(message)):
            validate(schedule)


def test_a_transfer_delays_the_next_rank_and_not_its_own() -> None:
    schedule = build_schedule("gpipe", 2, 2)
    spans = {str(span.action): span for span in simulate(schedule, [StageTimes(1, 1, 1, 0.5)] * 2).spans}
    assert spans["0F1"].begin_seconds == 1.0, "the sender computes on"
    assert spans["1F0"].begin_seconds == 1.5, "the receiver waits for the transfer"
    slow = {str(span.action): span for span in simulate(schedule, [StageTimes(1, 1, 1, 3.0)] * 2).spans}
    assert slow["1F1"].begin_seconds == 7.0, "two transfers one after the other"


def test_the_split_is_the_best_one() -> None:
    chance = random.Random(7)
    for _ in range(60):
        count, stages = chance.randint(3, 9), chance.randint(2, 3)
        layers = [
            LayerCost(str(i), chance.randint(1, 20), chance.randint(1, 9), chance.randint(1, 9))
            for i in range(count)
        ]
        kept = [3, 2, 1][:stages]
        limit = chance.choice([None, 60])
        every = []
        for cuts in itertools.combinations(range(1, count), stages - 1):
            bounds = list(itertools.pairwise([0, *cuts, count]))
            nbytes = [
                sum(each.state_bytes + kept[stage] * each.activation_bytes for each in layers[a:b])
                for stage, (a, b) in enumerate(bounds)
            ]
            if limit is None or max(nbytes) <= limit:
                every.append((max(sum(each.seconds for each in layers[a:b]) for a, b in bounds), list(cuts)))
        if not every:
            with pytest.raises(PlanError, match="keeps each within 60"):
                partition(layers, stages, in_flight=kept, limit_bytes=limit)
            continue
        found = partition(layers, stages, in_flight=kept, limit_bytes=limit)
        slowest = {tuple(cuts): seconds for seconds, cuts in every}[tuple(found)]
        assert slowest == min(every)[0], f"{found} of {layers}"
    with pytest.raises(PlanError, match=r"3 layers to cut at .*5 stages"):
        partition(layers[:3], 5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pipeline": 2, "schedule": "1f1c"}, "did you mean '1f1b'"),
        ({"pipeline": 2, "chunks": 3}, "has 1 stage a rank"),
        ({"pipeline": 2, "schedule": "interleaved", "chunks": 1}, "is 1f1b"),
        ({"pipeline": 2, "chunks": -1}, "expected a number from 1"),
        ({"pipeline": 2, "micro_batches": -1}, "expected a number from 1"),
        ({"pipeline": 2, "accumulate": 2}, "set micro_batches instead of accumulate"),
        ({"micro_batches": 4, "accumulate": 2}, "set micro_batches instead of accumulate"),
        ({"schedule": "gpipe"}, 'schedule = "gpipe" with pipeline = 1'),
        ({"pipeline_cuts": ["a"]}, "there is no pipeline"),
        ({"pipeline": 2, "pipeline_cuts": [1.5]}, "a list of texts"),
    ],
)
def test_keys_of_a_plan_that_do_not_fit(keys: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.from_mapping(keys, where="test")
    assert Plan.from_mapping({"pipeline": 3, "pipeline_cuts": [4, "8"]}, where="test").pipeline_cuts == ("4", "8")


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "schedule.svg"
    plan.write_text('pipeline = 4\nschedule = "zb-h1"\n')
    assert run(["plan", "--draw", str(plan), "--micro-batches", "8", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "rank 3   .   .   .   F0  I0  F1  I1  F2" in text, text
    assert "bubble 11" in text, "3 units of 27"
    assert out.read_text().count("<title>") == 1 + 4 * 8 * 3, "a box an action"
    assert run(["plan", "--draw", "--set", "pipeline=2", "--json"]) == 0
    assert '"actions": [["0F0"' in capsys.readouterr().out, "the actions as JSON"
    for words, message in (
        (["--set", "pipeline=1"], "without a pipeline"),
        (["--set", "pipeline=4", "--set", "schedule=interleaved", "--micro-batches", "6"], "micro_batches = 8"),
        (["--set", "pipeline=4", "--out", str(tmp_path / "no" / "x.svg")], "cannot write"),
        (["--set", "pipeline=4", "--micro-batches", "1000000"], "at most"),
    ):
        assert run(["plan", "--draw", *words]) == 2, words
        assert message in capsys.readouterr().err, words
    assert run(["plan"]) == 2, "nothing to do"
    assert (
        draw_grid(simulate(build_schedule("gpipe", 2, 500), [StageTimes(1, 1, 1)] * 2), unit_seconds=1.0).count(
            " ..."
        )
        == 2
    ), "a long step is cut"

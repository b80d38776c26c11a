"""What pipelines wait for, in runs whose truth is known: the bubble, a slow stage or rank, and transfers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from farandole.core.schedule import build_schedule
from farandole.core.schedule_simulation import StageTimes, simulate
from farandole.core.vocabulary.events import (
    OPTIMIZER,
    PIPELINE_WAIT,
    SETUP_BATCH,
    SETUP_OPTIMIZER,
    SETUP_PIPELINE,
    SETUP_PIPELINE_RANK,
    DataWait,
    Exchange,
    Phase,
    PipelineAction,
    Setup,
    Started,
    StepDone,
)
from farandole.observe.diagnose import Diagnosis, diagnose
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

MICRO_BATCHES = 8
STEPS = 40


def diagnosed(
    directory: Path,
    stages: int,
    replicas: int,
    slow: Mapping[int, float],
    send_seconds: float = 0.0005,
    facts: Mapping[str, Any] | None = None,
    stepping: float = 0.005,
    setup: Mapping[str, Any] | None = None,
    gap: float = 0.0,
) -> Diagnosis:
    """Diagnose pipelines with 30 ms a micro-batch; `slow`: by rank, times as long. Ranks of a stage follow.

    `gap`: seconds in no phase before each action.
    """
    directory.mkdir()
    if facts is not None:
        (directory / "run.json").write_text(json.dumps({"version": 1, **facts}))
    ranks, draw, begin = stages * replicas, random.Random(0), 0.0
    schedule = build_schedule("1f1b", stages, MICRO_BATCHES, 0)
    writers = [StepRecorder([EventWriter(directory, rank)]) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        writer.record(Started(rank, ranks, f"host{rank // 4}", 0, 0, 0.0, "virtual", "one"))
        text = f"1f1b {stages} {MICRO_BATCHES} 1"
        writer.record(Setup({SETUP_PIPELINE: text, SETUP_PIPELINE_RANK: rank // replicas, **(setup or {})}))
    for step in range(1, STEPS + 1):
        runs = []
        for replica in range(replicas):
            each = [0.01 * slow.get(at * replicas + replica, 1.0) * draw.gauss(1, 0.01) for at in range(stages)]
            runs.append(simulate(schedule, [StageTimes(one, one, one, send_seconds) for one in each]))
        end = begin + max(run.total_seconds for run in runs)
        for rank, writer in enumerate(writers):
            at = begin
            writer.record(DataWait(begin, begin, 8))
            for span in runs[rank % replicas].spans:
                if span.rank == rank // replicas:
                    first, last = begin + span.begin_seconds, begin + span.end_seconds
                    if first > at:
                        writer.record(Phase(PIPELINE_WAIT, at, first))
                    action = span.action
                    writer.record(PipelineAction(action.stage, action.kind, action.micro_batch, first + gap, last))
                    at = last
            writer.record(Exchange((at,), at, end + 0.002, 0, ()))
            writer.record(Phase(OPTIMIZER, end + 0.002, end + 0.002 + stepping))
            writer.record(StepDone(step, end + 0.002 + stepping))
        begin = end + 0.002 + stepping
    for writer in writers:
        writer.close()
    return diagnose(directory)


def test_the_bubble_of_equal_stages(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "run", 4, 2, {})
    assert found.findings[0].kind == "bubble", found.verdict
    assert found.findings[0].seconds == pytest.approx(3 * 0.03, rel=0.05), "3 of 11 micro-batches' time"
    assert "slow-stage" not in {each.kind for each in found.findings}, found.verdict


def test_the_slow_stage_is_found(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "run", 4, 2, {4: 1.6, 5: 1.6})
    slow = {each.kind: each for each in found.findings}
    assert slow["slow-stage"].ranks == (4, 5), found.verdict
    assert found.bound == "pipeline", found.verdict
    assert "pause" not in slow, "waits for another stage are no pauses"


def test_the_slow_rank_of_one_of_many_pipelines_is_found(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "run", 2, 4, {5: 1.6})
    slow = {each.kind: each for each in found.findings}
    assert slow["slow-stage"].ranks == (5,), found.verdict
    assert slow["slow-stage"].title.startswith("rank 5 of stage 1"), slow["slow-stage"].title
    assert "pipeline-communication" not in slow, "the others wait for rank 5, not for the network"


def test_transfers_that_nothing_hides_are_found(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "run", 4, 1, {}, send_seconds=0.02)
    kinds = {each.kind for each in found.findings}
    assert "pipeline-communication" in kinds, found.verdict
    assert "slow-stage" not in kinds, found.verdict


@pytest.mark.parametrize(
    ("setup", "stepping", "promise"),
    [({}, 0.001, 0.045 - 0.0095), ({SETUP_OPTIMIZER: "SGD"}, 0.001, 0.045 - 0.019), ({}, 0.005, None),
     ({SETUP_BATCH: 20}, 0.001, None)],
)  # fmt: skip
def test_more_micro_batches_are_promised_less_what_they_cost(
    setup: Mapping[str, Any], stepping: float, promise: float | None, tmp_path: Path
) -> None:
    """Each of eight more takes as long as a step of Adam; 20 samples are not sixteen equal micro-batches."""
    found = diagnosed(tmp_path / "run", 4, 1, {}, send_seconds=0.0, stepping=stepping, setup=setup)
    fix = next(each for each in found.findings if each.kind == "bubble").fixes[0]
    assert (fix.gain is None) is (promise is None), fix
    assert bool(fix.paste) is (promise is not None)
    if fix.gain is not None:
        assert fix.gain.seconds == pytest.approx(promise, rel=0.05)


def test_what_a_schedule_does_between_its_actions_is_no_code_of_the_script(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "run", 2, 1, {}, gap=0.004)
    assert "other" not in {each.kind for each in found.findings}, found.verdict

"""A simulated run is a run: what was planted in it, the commands that read runs find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.core.vocabulary.degrees import Degrees
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.observe.diagnose import compare, diagnose
from farandole.observe.export import export_run
from farandole.observe.report import write_report
from farandole.plan.scale.noise import Noise
from farandole.plan.scale.simulated_run import SimulatedJob
from farandole.plan.scale.step_roles import step_seconds
from tests.unit.plan.simulated_jobs import data_parallel, pipelined, write

NOISE = Noise(0.01)


def test_the_slow_rank_is_found(tmp_path: Path) -> None:
    job = SimulatedJob(data_parallel(8), 4, noise=NOISE, slow_ranks={3: 1.5})
    found = diagnose(write(tmp_path / "run", job))
    assert found.findings[0].kind == "straggler", found.verdict
    assert found.findings[0].ranks == (3,), found.verdict
    assert found.findings[0].seconds == pytest.approx(0.0475, rel=0.1), "half of computing and of the optimizer"
    assert found.verdict.startswith("Simulated."), found.verdict
    assert any("simulated" in note for note in found.notes), found.notes


def test_a_run_without_a_fault_takes_what_roles_say(tmp_path: Path) -> None:
    job = SimulatedJob(data_parallel(8), 4)
    found = diagnose(write(tmp_path / "run", job))
    assert found.step_seconds == pytest.approx(step_seconds(job.work), rel=1e-4), "microseconds are recorded"
    assert not {each.kind for each in found.findings} & {"straggler", "slow-link", "pause", "jitter"}, (
        found.verdict
    )


def test_the_slow_link_is_found(tmp_path: Path) -> None:
    job = SimulatedJob(data_parallel(8), 2, noise=NOISE, slow_links={1: 5.0})
    found = diagnose(write(tmp_path / "run", job))
    assert found.findings[0].kind == "slow-link", found.verdict
    assert found.findings[0].hosts == ("simulated-1",), found.verdict


def test_the_slow_stage_is_found(tmp_path: Path) -> None:
    plan = Plan(pipeline=4, micro_batches=8)
    job = SimulatedJob(pipelined(Degrees(pipeline=4, data=2)), 4, noise=NOISE, slow_ranks={4: 1.6, 5: 1.6})
    found = diagnose(write(tmp_path / "slow", job, plan))
    slow = {each.kind: each for each in found.findings}
    assert slow["slow-stage"].ranks == (4, 5), found.verdict
    assert found.bound == "pipeline", found.verdict
    assert "pause" not in slow, "waits for another stage are no pauses"
    even = diagnose(write(tmp_path / "even", SimulatedJob(job.work, 4, noise=NOISE), plan))
    assert "slow-stage" not in {each.kind for each in even.findings}, even.verdict
    assert even.findings[0].kind == "bubble", even.verdict


def test_the_slow_rank_of_one_of_many_pipelines_is_found(tmp_path: Path) -> None:
    plan = Plan(pipeline=2, micro_batches=8)
    work = pipelined(Degrees(pipeline=2, data=4))
    found = diagnose(write(tmp_path / "run", SimulatedJob(work, 8, noise=NOISE, slow_ranks={5: 1.6}), plan))
    slow = {each.kind: each for each in found.findings}
    assert slow["slow-stage"].ranks == (5,), found.verdict
    assert slow["slow-stage"].title.startswith("rank 5 of stage 1"), slow["slow-stage"].title
    assert "pipeline-communication" not in slow, "the others wait for rank 5, not for the network"


def test_reports_comparisons_and_exports_of_simulated_runs(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / name, SimulatedJob(data_parallel(4), 4, noise=NOISE, slow_ranks=slow))
        for name, slow in (("even", {}), ("slow", {2: 1.5}))
    )
    page = write_report(other).read_text()
    assert "this run was simulated" in page, "the page says it"
    difference = compare(one, other)
    assert difference.outcome == "slower", difference.verdict
    assert any("simulated" in note for note in difference.notes), difference.notes
    export_run(other, "chrome", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()), "a timeline"
    assert json.loads((other / "run.json").read_text())["simulated"] == {"steps": 40}, "marked"


def test_simulated_runs_that_cannot_be_written(tmp_path: Path) -> None:
    work = data_parallel(4)
    for job, match in (
        (SimulatedJob(data_parallel(512), 8), "at most 256"),
        (SimulatedJob(work, 4, slow_ranks={4: 2.0}), "ranks 0 to 3"),
        (SimulatedJob(work, 2, slow_links={2: 2.0}), "hosts 0 to 1"),
        (SimulatedJob(work, 4, steps=0), "at least 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            write(tmp_path / match.replace(" ", ""), job)
    run = write(tmp_path / "run", SimulatedJob(work, 4, steps=2))
    with pytest.raises(ConfigError, match="exists already"):
        write(run, SimulatedJob(work, 4, steps=2))

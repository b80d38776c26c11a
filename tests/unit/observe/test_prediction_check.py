"""Predicted against measured: on virtual runs whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.events import EVALUATION, OTHER, InnerExchange, Phase, Started, StepDone
from farandole.observe.diagnose import compare
from farandole.observe.figures.prediction_check import PredictionCheck, TermCheck
from farandole.observe.figures.summary import Summary, summarise
from farandole.observe.records.run_reader import read_run
from farandole.observe.records.step_recorder import StepBuilder
from farandole.observe.report.page import write_report
from tests.unit.observe.synthetic import Machine, write_run

TRUE = {"compute": 0.0905, "optimizer": 0.006, "data": 0.1074, "loader": 0.0005}
"""What the virtual machine below takes, in seconds."""
PREDICTED = {"step_seconds": 0.2049, "low_seconds": 0.19, "high_seconds": 0.22, "ranks": 4, **TRUE}
SLOW_LINK = Machine(bytes_per_second=3e8)


def run_of(directory: Path, predicted: Mapping[str, Any], machine: Machine = SLOW_LINK) -> Summary:
    return summarise(write_run(directory, replace(machine, plan={"predicted": dict(predicted)})))


def check_of(directory: Path, predicted: Mapping[str, Any], machine: Machine = SLOW_LINK) -> PredictionCheck:
    check = run_of(directory, predicted, machine).prediction
    assert check is not None, "the plan predicts a step"
    return check


def term(check: PredictionCheck, name: str) -> TermCheck:
    return next(each for each in check.terms if each.name == name)


def test_a_true_prediction_is_inside_and_no_term_is_off(tmp_path: Path) -> None:
    check = check_of(tmp_path / "run", PREDICTED)
    for name, true in (("compute", TRUE["compute"]), ("optimizer", 0.006), ("data exchange", TRUE["data"])):
        assert term(check, name).measured_seconds == pytest.approx(true, rel=0.03), name
    measured = sum(each.measured_seconds or 0.0 for each in check.terms)
    assert measured == pytest.approx(check.step.measured_seconds, rel=0.01), "the terms add up to the step"
    assert check.is_inside is True
    assert check.most_off is None
    assert check.remedy == ""


@pytest.mark.parametrize("name", ["compute", "data"])
def test_the_term_that_is_off_is_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    wrong = {
        **PREDICTED,
        name: 0.3 * PREDICTED[name],
        "step_seconds": 0.13,
        "low_seconds": 0.12,
        "high_seconds": 0.15,
    }
    summary = run_of(tmp_path / "run", wrong)
    check = summary.prediction
    assert check is not None, "the plan predicts a step"
    assert check.most_off is not None, "a term is off"
    assert check.most_off.terms == (name,)
    assert check.most_off.ratio == pytest.approx(1 / 0.3, rel=0.05)
    assert check.is_inside is False
    assert f"farandole measure --from {tmp_path / 'run'} --cluster" in check.remedy
    text = summary.to_text()
    assert "outside 120 ms to 150 ms" in text
    assert f"{check.most_off.name} is most off" in text
    mapping = json.loads(json.dumps(summary.to_mapping()))["prediction"]
    assert mapping["most_off"] == check.most_off.name
    assert mapping["is_inside"] is False
    assert mapping["step"]["ratio"] == check.step.ratio


def test_what_was_not_seen_is_unknown_and_not_zero(tmp_path: Path) -> None:
    machine = replace(SLOW_LINK, exchanges_are_seen=False)
    check = check_of(tmp_path / "run", {**PREDICTED, "peak_bytes": 1e9}, machine)
    unknown = term(check, "data exchange")
    assert unknown.measured_seconds is None
    assert "no exchange of gradients was seen" in unknown.unknown
    assert check.peak is not None, "a peak was predicted"
    assert check.peak.measured_bytes is None
    assert "not recorded" in check.peak.unknown
    assert any(" unknown " in line and "data exchange" in line for line in check.to_lines())


def test_a_run_of_other_ranks_or_samples_is_no_test(tmp_path: Path) -> None:
    for number, other in enumerate(({"ranks": 8}, {"global_batch": 64})):
        check = check_of(tmp_path / str(number), {**PREDICTED, "low_seconds": 0.2, **other})
        assert check.is_inside is None
        assert check.most_off is None, "what was predicted for another run is not off"
        assert "no test of the prediction" in " ".join(check.notes)
    assert not check_of(tmp_path / "same", {**PREDICTED, "global_batch": 32}).notes


def test_the_peak_is_what_was_held_beside_the_rest_of_the_process(tmp_path: Path) -> None:
    setup = {"other_bytes": 500_000_000, "peak_before_bytes": 600_000_000}
    for peak, measured in ((1_400_000_000, 900_000_000), (600_000_000, None)):
        machine = replace(SLOW_LINK, setup=setup, sample={rank: {"peak_bytes": peak - rank} for rank in range(4)})
        found = check_of(tmp_path / str(peak), {**PREDICTED, "peak_bytes": 1e9}, machine).peak
        assert found is not None, "a peak was predicted"
        assert found.measured_bytes == measured, "unknown where more was held before training"
        assert found.beside_bytes == (500_000_000 if measured else 0), "what was taken off"


def test_a_plan_that_predicts_nothing_or_nonsense_is_compared_with_nothing(tmp_path: Path) -> None:
    assert run_of(tmp_path / "nothing", {}).prediction is None
    assert run_of(tmp_path / "nonsense", {"step_seconds": "x"}).prediction is None
    assert run_of(tmp_path / "newer", {"step_seconds": 1.0, "quantum": 1.0}).prediction is None


def test_what_a_rank_recorded_goes_before_the_launchers_plan(tmp_path: Path) -> None:
    applied = json.dumps({"step_seconds": 0.5})
    check = check_of(tmp_path / "run", PREDICTED, replace(SLOW_LINK, setup={"predicted": applied}))
    assert check.step.predicted_seconds == 0.5
    assert check.interval_seconds is None
    assert all(each.predicted_seconds is None for each in check.terms), "only the step was predicted"


def test_compare_and_the_report_show_it(tmp_path: Path) -> None:
    run_of(tmp_path / "a", PREDICTED)
    run_of(tmp_path / "b", {**PREDICTED, "compute": 0.01})
    found = compare(tmp_path / "a", tmp_path / "b")
    text = found.to_text()
    assert "predicted against measured, A:" in text
    assert "compute is most off" in text
    assert max(map(len, text.splitlines())) <= 100 + len(str(tmp_path)), "but for the command"
    assert found.plan == {}, "plans that differ in what they predict are the same"
    assert json.loads(json.dumps(found.to_mapping()))["predictions"][1]["most_off"] == "compute"
    page = write_report(tmp_path / "b").read_text()
    assert "Predicted against measured" in page
    assert "compute is most off" in page


def test_exchanges_of_activations_count_by_degree_but_for_those_of_evaluations() -> None:
    builder = StepBuilder()
    builder.take(Started(0, 2, "a", 1, 0, 0.0, "2026-01-01"))
    for begin in (1.0, 2.0, 3.0):
        builder.take(InnerExchange("tensor", begin, begin + 0.25, 100))
    builder.take(Phase(EVALUATION, 1.9, 3.5))
    builder.take(InnerExchange("context", 4.0, 4.5, 100))
    row = builder.take(StepDone(1, 5.0))
    assert row is not None, "the step is done"
    assert row.inner_seconds == {"tensor": 0.25, "context": 0.5}
    assert row.inner_phases == {OTHER: 0.75}
    assert row.inner_bytes == 200
    again = builder.take(StepDone(2, 6.0))
    assert again is not None, "the next step is done"
    assert again.inner_seconds == {}


def test_exchanges_inside_of_passes_are_no_computing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(SLOW_LINK, plan={"predicted": {**PREDICTED, "tensor": 0.02}}))
    for path in run.glob("events-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        inner = {"inner": {"tensor": 20_000}, "inner_in": {"forward": 20_000}, "inner_sent": 1000}
        lines = [{**line, **inner} if "step" in line else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(run).timelines[0].steps[-1].inner_seconds == {"tensor": 0.02}
    check = summarise(run).prediction
    assert check is not None, "the plan predicts a step"
    assert term(check, "tensor exchange").measured_seconds == pytest.approx(0.02)
    assert term(check, "compute").measured_seconds == pytest.approx(TRUE["compute"] - 0.02, rel=0.03)
    unseen = check_of(tmp_path / "unseen", {**PREDICTED, "tensor": 0.02})
    assert term(unseen, "compute + tensor").terms == ("compute", "tensor"), "what is not told apart is one row"

"""Where the time of a step went that an accelerator ran: as the device says, not as the host queued it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.core.vocabulary.events import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    DataWait,
    DevicePhases,
    Logged,
    Phase,
    Started,
    StepDone,
)
from farandole.observe.diagnose import diagnose
from farandole.observe.figures.step_parts import step_parts
from farandole.observe.figures.summary import summarise
from farandole.observe.records.run_reader import read_run
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

STEP = 0.142


def device_run(directory: Path, *, steps: int = 12, late: int = 1) -> Path:
    """Write a run as one GPU gave it: 4 ms of queueing, then the host waits for the loss of the step.

    The device: forward 1-46, backward 46-134, optimizer 134-140. Its times of the last `late` steps are not known.
    """
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({"size": 1, "command": ["python", "t.py"]}))
    writer, at = StepRecorder([EventWriter(directory, 0)]), 100.0
    writer.record(Started(0, 1, "h", 1, 0, at, "2026-11-26T12:00:00+00:00", "h"))
    for step in range(1, steps + 1):
        writer.record(DataWait(at, at + 0.0005, 4))
        for name, begin, end in ((FORWARD, 0.5, 1.6), (BACKWARD, 1.6, 3.9), (OPTIMIZER, 3.9, 4.2)):
            writer.record(Phase(name, at + begin / 1e3, at + end / 1e3))
        writer.record(Logged(1.0, 100, 10))
        writer.record(StepDone(step, at + STEP))
        at += STEP
        if step > late:
            begin = at - STEP * (late + 1)
            ran = ((FORWARD, 1.0, 46.0), (BACKWARD, 46.0, 134.0), (OPTIMIZER, 134.0, 140.0))
            phases = tuple(Phase(name, begin + a / 1e3, begin + b / 1e3) for name, a, b in ran)
            writer.record(DevicePhases(step - late, phases))
    writer.close()
    return directory


def test_a_step_is_divided_as_the_device_ran_it(tmp_path: Path) -> None:
    directory = device_run(tmp_path / "r")
    (parts,) = step_parts(read_run(directory).timelines)
    known = parts[3]
    assert known.phases == pytest.approx(
        {FORWARD: 0.0455, BACKWARD: 0.088, OPTIMIZER: 0.006, DATA: 0.0005, OTHER: 0.002}, abs=1e-6
    )
    assert sum(known.phases.values()) == pytest.approx(STEP)
    assert known.compute == pytest.approx(0.1395, abs=1e-6)
    assert parts[-1].phases[OTHER] == pytest.approx(STEP - 0.0042, abs=1e-6), "the device never told of it"


def test_summary_and_diagnosis_do_not_take_waiting_for_the_device_for_a_pause(tmp_path: Path) -> None:
    directory = device_run(tmp_path / "r", steps=40)
    shares = summarise(directory).shares
    assert shares is not None
    assert shares["data"] == pytest.approx(0.0005 / STEP, abs=1e-3)
    found = diagnose(directory)
    assert found.bound == "compute", found.verdict
    assert found.step_seconds is not None
    assert sum(found.parts[name] for name in ("forward", "backward", "optimizer")) > 0.95 * found.step_seconds


def test_work_of_the_step_before_is_work_too_and_the_host_counts_where_the_device_is_idle(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({"size": 1, "command": ["python", "t.py"]}))
    writer = StepRecorder([EventWriter(directory, 0)])
    writer.record(Started(0, 1, "h", 1, 0, 100.0, "", "h"))
    for step in (1, 2):
        at = 99.9 + step / 10
        writer.record(DataWait(at, at + 0.06, 4))
        writer.record(Phase(FORWARD, at + 0.06, at + 0.07))
        writer.record(StepDone(step, at + 0.1))
    writer.record(DevicePhases(1, (Phase(FORWARD, 100.06, 100.08), Phase(BACKWARD, 100.08, 100.12))))
    writer.record(DevicePhases(2, (Phase(FORWARD, 100.16, 100.19),)))
    writer.close()
    (parts,) = step_parts(read_run(directory).timelines)
    assert parts[0].phases == pytest.approx({DATA: 0.06, FORWARD: 0.02, BACKWARD: 0.02, OTHER: 0.0}, abs=1e-6)
    assert parts[1].phases == pytest.approx({BACKWARD: 0.02, DATA: 0.04, FORWARD: 0.03, OTHER: 0.01}, abs=1e-6)

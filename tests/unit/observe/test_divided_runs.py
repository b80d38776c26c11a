"""Runs of divided models with a planted fault: what the summary and the diagnosis say of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.degrees import ORDER
from farandole.core.vocabulary.events import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    SETUP_DEGREES,
    SETUP_ELEMENTS,
    SETUP_REPLICAS,
    SETUP_ROWS_IN_STEP,
    SETUP_SAME_SAMPLES,
    DataWait,
    InnerExchange,
    Phase,
    Setup,
    Started,
    StepDone,
)
from farandole.observe.diagnose import Diagnosis, diagnose
from farandole.observe.figures.summary import summarise
from farandole.observe.records.run_reader import read_run
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

from .runs import progress_of

STEPS = 40


@dataclass(frozen=True)
class Training:
    """A virtual run. Seconds are of each step."""

    degree: str
    plan: Mapping[str, Any]
    ranks: int = 2
    same: int = 1
    """Ranks that train on the same samples."""
    samples: int = 8
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, where it is not the usual."""
    late: Mapping[int, float] = field(default_factory=dict)
    """More of forward, by rank."""
    wire: float = 0.0
    """What the network takes of the exchanges inside of forward, or of the optimizer's step for "shard"."""
    wires: Mapping[int, float] = field(default_factory=dict)
    """The same by group of neighbours, where they are unlike."""
    group: int = 0
    """Ranks of a group; 0: all of them are one, and the mesh is not recorded."""
    hosts: int = 1
    setup: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


USUAL = {"data": 0.001, FORWARD: 0.03, BACKWARD: 0.06, OPTIMIZER: 0.005}


def write(directory: Path, run: Training) -> Path:
    directory.mkdir(parents=True)
    facts = {
        "version": 1, "size": run.ranks, "command": ["python", "t.py"], "plan": dict(run.plan), "hosts": ["h"],
        "typed_command": ["farandole", "run", "-np", str(run.ranks), "--", "python", "t.py"],
        **run.facts,
    }  # fmt: skip
    (directory / "run.json").write_text(json.dumps(facts))
    for rank in range(run.ranks):
        writer = StepRecorder([EventWriter(directory, rank)])
        for event in events_of(run, rank):
            writer.record(event)
        writer.close()
    return directory


def events_of(run: Training, rank: int) -> Sequence[Any]:
    seconds = {**USUAL, **run.seconds}
    host = f"h{rank % run.hosts}" if run.hosts > 1 else "h"
    found: list[Any] = [Started(rank, run.ranks, host, 1, 0, 100.0, "2026-01-01")]
    found.append(Setup({SETUP_REPLICAS: 1, **run.setup}))
    if run.group:
        sizes = {name: {"data": run.ranks // run.group, run.degree: run.group}.get(name, 1) for name in ORDER}
        found.append(Setup({SETUP_DEGREES: " ".join(map(str, sizes.values()))}))
    group = rank // (run.group or run.ranks)
    late = [run.late.get(each, 0.0) for each in range(run.ranks) if each // (run.group or run.ranks) == group]
    if run.same > 1:
        found.append(Setup({SETUP_SAME_SAMPLES: f"{rank % run.same} {run.same}"}))
    at = 100.0
    for step in range(1, STEPS + 1):
        found.append(DataWait(at, at + seconds["data"], run.samples))
        at += seconds["data"]
        for name in (FORWARD, BACKWARD, OPTIMIZER):
            begin = at
            at += seconds[name] + (run.late.get(rank, 0.0) if name == FORWARD else 0.0)
            if name == (OPTIMIZER if run.degree == "shard" else FORWARD):
                inner = run.wires.get(group, run.wire) + max(late) - run.late.get(rank, 0.0)
                cuts = [at + inner * part / 4 for part in range(5)]
                found += [InnerExchange(run.degree, *ends, 250) for ends in itertools.pairwise(cuts)]
                at += inner
            found.append(Phase(name, begin, at))
        found.append(StepDone(step, at))
    return found


def found_in(tmp_path: Path, run: Training) -> Diagnosis:
    return diagnose(write(tmp_path / "run", run))


BIG = {"tensor": 2, "context": 2, "expert": 2, "shard": 2, "rows": 1, "loss": 1}


@pytest.mark.parametrize("degree", BIG)
def test_an_exchange_inside_of_phases_binds_the_run_and_has_a_fix(tmp_path: Path, degree: str) -> None:
    plan = {degree: 2} if degree in ("tensor", "context", "expert") else {"zero": 2} if degree == "shard" else {}
    same = 2 if degree in ("tensor", "context") else 1
    setup = {SETUP_ROWS_IN_STEP: True} if degree == "rows" else {}
    run = write(tmp_path / "run", Training(degree, plan, same=same, wire=0.06, setup=setup))
    found, summary = diagnose(run), summarise(run)
    assert found.bound == "communication", found.verdict
    (first, *_) = found.findings
    assert first.kind == f"{degree}-communication"
    assert first.seconds == pytest.approx(0.06, rel=0.01)
    assert first.fixes
    assert summary.shares is not None
    assert summary.shares["communication"] == pytest.approx(0.06 / 0.156, rel=0.01)
    assert summary.shares["waiting"] == pytest.approx(0.0, abs=1e-6)
    assert summary.sent_bytes_per_step == 1000
    assert found.parts[OPTIMIZER if degree == "shard" else FORWARD] == pytest.approx(
        USUAL[OPTIMIZER if degree == "shard" else FORWARD], rel=0.01
    ), "the phase is without its exchanges"
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
    pasted = first.fixes[0].paste
    said = {
        "tensor": "--set tensor=1", "context": "--set context=1", "expert": "--set expert_codec=int8",
        "shard": "--set overlap_gather=true",
        "rows": "staleness=None  # argument of fd.RowTable",
        "loss": "loss_function(model(inputs), targets).backward()",
    }  # fmt: skip
    assert said[degree] in pasted


def test_half_of_four_tensor_ranks_saves_two_thirds_of_the_bytes(tmp_path: Path) -> None:
    plan = {"tensor": 4, "data": 2, "sequence_parallel": True}
    found = found_in(tmp_path, Training("tensor", plan, ranks=8, same=4, wire=0.06))
    fix = found.findings[0].fixes[0]
    assert fix.gain is not None
    assert fix.gain.seconds == pytest.approx(0.06 * 2 / 3, rel=0.01)
    assert fix.changes == {"tensor": 2, "data": "rest"}
    alone = found_in(tmp_path / "two", Training("tensor", {**plan, "tensor": 2}, ranks=4, same=2, wire=0.06))
    assert alone.findings[0].fixes[0].changes == {"tensor": 1, "sequence_parallel": False, "data": "rest"}


@pytest.mark.parametrize("degree", ["tensor", "context", "expert"])
def test_the_network_is_told_from_waiting_within_a_group(tmp_path: Path, degree: str) -> None:
    slow = Training(degree, {degree: 2, "data": "rest"}, ranks=4, group=2, wires={0: 0.001, 1: 0.06})
    run = write(tmp_path / "slow", slow)
    (first, *_), summary = diagnose(run).findings, summarise(run)
    assert (first.kind, first.ranks) == (f"{degree}-communication", (2, 3)), first
    assert first.seconds == pytest.approx(0.06, rel=0.01), "as long as the slower link takes"
    assert "ranks 2 and 3" in first.evidence[1]
    assert summary.shares is not None
    assert summary.shares["waiting"] == pytest.approx(0.0, abs=1e-6), "nobody of a group waits for the other group"
    late = write(tmp_path / "late", Training(degree, {degree: 2}, ranks=4, group=2, late={3: 0.05}, wire=0.001))
    (first, *_), summary = diagnose(late).findings, summarise(late)
    assert (first.kind, first.ranks) == ("straggler", (3,)), first
    assert summary.to_mapping()["shares"]["communication"] < 0.02


def test_a_degree_that_is_the_rest_has_a_fix(tmp_path: Path) -> None:
    found = found_in(tmp_path, Training("context", {"context": "rest", "data": 2}, ranks=8, same=4, wire=0.06))
    assert found.findings[0].fixes[0].changes == {"context": 2, "data": "rest"}
    plan = {"context": "rest", "shard": 2, "zero": 1}
    alone = found_in(tmp_path / "shard", Training("context", plan, ranks=4, same=2, wire=0.06))
    assert alone.findings[0].fixes[0].changes == {"context": 1}, "data is the rest already"


@pytest.mark.parametrize(("elements", "saved"), [(60, 0.06 - 0.06 / 1000 * 4 * 120 / 2), (600, None)])
def test_fewer_tensor_ranks_are_told_where_they_save_more_than_the_gradients_cost(
    tmp_path: Path, elements: int, saved: float | None
) -> None:
    run = Training("tensor", {"tensor": 2}, same=2, wire=0.06, setup={SETUP_ELEMENTS: elements})
    fix = found_in(tmp_path, run).findings[0].fixes[0]
    assert fix.gain is not None
    if saved is None:
        assert fix.paste == ""
        assert "a faster link" in fix.what
    else:
        assert fix.gain.seconds == pytest.approx(saved, rel=0.01)


def test_ranks_of_experts_keep_their_tokens_where_there_are_fewer(tmp_path: Path) -> None:
    run = Training("expert", {"expert": 4, "expert_codec": "int8"}, ranks=4, wire=0.06)
    (fewer,) = found_in(tmp_path, run).findings[0].fixes
    assert fewer.changes["expert"] == 2
    assert fewer.gain is not None
    assert fewer.gain.seconds == pytest.approx(0.06 * (1 - (1 / 2) / (3 / 4)), rel=0.01)


def test_stepped_parameters_between_hosts_travel_in_fewer_bits_where_forward_hides_little(tmp_path: Path) -> None:
    run = Training("shard", {"zero": 2}, wire=0.06, hosts=2)
    packed, behind = found_in(tmp_path, run).findings[0].fixes
    assert packed.changes == {"weight_codec": "int8"}
    assert behind.changes == {"overlap_gather": True}
    assert behind.gain is not None
    assert behind.gain.seconds == pytest.approx(USUAL[FORWARD], rel=0.01), "no more than forward takes"


@pytest.mark.parametrize("degree", ["tensor", "context", "expert"])
def test_a_slow_rank_is_named_and_its_neighbours_wait_is_no_network(tmp_path: Path, degree: str) -> None:
    run = write(tmp_path / "run", Training(degree, {degree: 4}, ranks=4, late={2: 0.05}, wire=0.001))
    found, summary = diagnose(run), summarise(run)
    assert found.bound == "straggler", found.verdict
    assert found.findings[0].ranks == (2,)
    shares = summary.to_mapping()["shares"]
    assert shares["communication"] < 0.02
    assert shares["waiting"] == pytest.approx(0.05 * 3 / 4 / 0.147, rel=0.02)


@pytest.mark.parametrize(
    ("seconds", "bound"), [({"data": 0.08}, "input"), ({}, "compute")], ids=["slow data", "nothing"]
)
def test_what_else_is_planted_in_a_divided_run_is_found(
    tmp_path: Path, seconds: Mapping[str, float], bound: str
) -> None:
    found = found_in(tmp_path, Training("tensor", {"tensor": 2}, same=2, seconds=seconds, wire=0.001))
    assert found.bound == bound, found.verdict


@pytest.mark.parametrize(("ranks", "same", "samples"), [(2, 2, 8), (4, 2, 8), (4, 4, 2), (3, 3, 8), (6, 3, 7)])
def test_samples_of_ranks_that_share_them_are_counted_once(
    tmp_path: Path, ranks: int, same: int, samples: int
) -> None:
    predicted = {"step_seconds": 0.1, "global_batch": samples * ranks // same}
    plan = {"tensor": same, "predicted": predicted}
    run = Training("tensor", plan, ranks=ranks, same=same, samples=samples, wire=0.001)
    summary = summarise(write(tmp_path / "run", run))
    assert summary.samples == STEPS * samples * ranks // same
    by_step = [
        sum(timeline.steps[step].samples for timeline in read_run(tmp_path / "run").timelines)
        for step in range(STEPS)
    ]
    assert by_step == [samples * ranks // same] * STEPS
    assert summary.prediction is not None
    assert summary.prediction.notes == (), "the batch is what was predicted"
    rows = progress_of(events_of(run, 0))
    rates = [row["samples_per_second"] * row["seconds"] for row in rows if "samples_per_second" in row]
    assert sum(rates) / len(rows) == pytest.approx(samples * ranks / same, rel=0.05)

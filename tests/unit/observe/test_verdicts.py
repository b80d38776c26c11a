"""Verdicts on faults that a first user makes: cores, threads, own code, slow data, optimizers."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.units import parse_bytes
from farandole.observe.diagnose import Diagnosis, Finding, compare, diagnose, to_text
from farandole.observe.diagnose.comparison import _is_set
from farandole.observe.diagnose.host_facts import with_first
from farandole.observe.diagnose.pauses import period_of
from farandole.observe.diagnose.step_table import (
    bucket_bytes_of,
    has_phases,
    make_disjoint,
    make_step_table,
    room_of,
    sources_of,
)
from farandole.observe.figures.summary import describe_efficiency, summarise
from farandole.observe.records.run_reader import read_run
from farandole.observe.report import content as report_run
from farandole.observe.report import page
from tests.unit.observe.synthetic import Machine, every, healthy, only, write_run

BOUND = {"threads": 1, "cores": 1, "worker_cores": 1, "device": "cpu", "loader_workers": 0}
SLOW_DATA: dict[str, Any] = {"extra": {"data": lambda rank, step: 0.1}, "facts": {"cores": 4}}


def of(directory: Path, machine: Machine) -> Diagnosis:
    return diagnose(write_run(directory, machine))


def finding(found: Diagnosis, kind: str) -> Finding:
    return next(each for each in found.findings if each.kind == kind)


def workers_of(each: Finding) -> list[int]:
    return [fix.changes["loader_workers"] for fix in each.fixes if "loader_workers" in fix.changes]


# -- slow data (V1) -----------------------------------------------------------------------------


def test_data_that_costs_cpu_time_of_a_busy_core_is_not_cured_by_workers(tmp_path: Path) -> None:
    first = of(tmp_path / "r", healthy(**SLOW_DATA, setup=BOUND, data_cpu=0.98)).findings[0]
    assert (first.kind, workers_of(first)) == ("input", []), first
    assert "CPU time" in first.title
    assert "98%" in first.evidence[0]
    assert "decode" in first.fixes[0].what
    assert "num_workers" not in " ".join(fix.paste for fix in first.fixes)


def test_a_rank_that_has_no_core_while_it_loads_gets_no_workers(tmp_path: Path) -> None:
    tired = {"process_cores": 0.2, "core_wait_share": 0.7, "machine_share": 1.0, "preemptions": 99, "cores": 1}
    machine = healthy(**SLOW_DATA, setup=BOUND, data_cpu=0.2, sample=dict.fromkeys(range(4), tired))
    assert workers_of(finding(of(tmp_path / "r", machine), "input")) == []


def test_workers_gain_as_far_as_cores_are_free(tmp_path: Path) -> None:
    """Computing of 97 ms fills one core; a second one takes 100 ms of CPU work a step beside it."""
    two = {**BOUND, "worker_cores": 5}  # four cores that no rank has, for four ranks
    facts = {"cores": 9}
    machine = healthy(extra={"data": lambda rank, step: 0.1}, facts=facts, setup=two, data_cpu=1.0)
    first = of(tmp_path / "two", machine).findings[0]
    assert workers_of(first), first
    gain = first.fixes[0].gain
    assert gain is not None
    assert gain.seconds == pytest.approx(0.1 - 0.002, abs=0.003), "the step is then the work over two cores"
    half = {**BOUND, "worker_cores": 3}
    part = of(tmp_path / "half", replace(machine, setup=half)).findings[0].fixes[0].gain
    assert part is not None
    assert part.seconds == pytest.approx(0.197 - 0.197 / 1.5, abs=0.003)


def test_data_that_sleeps_is_cured_by_workers_and_then_no_more_are_asked_for(tmp_path: Path) -> None:
    slept = of(tmp_path / "r", healthy(**SLOW_DATA, setup=BOUND, data_cpu=0.02)).findings[0]
    assert workers_of(slept) == [2], slept
    assert slept.fixes[0].gain is not None
    assert slept.fixes[0].gain.seconds == pytest.approx(0.1, rel=0.05)
    idle = {rank: {"process_cores": 0.5, "machine_share": 0.4, "cores": 1} for rank in range(4)}
    sleepy = healthy(**SLOW_DATA, setup={**BOUND, "loader_workers": 4}, data_cpu=0.01, sample=idle)
    more = of(tmp_path / "more", sleepy).findings[0]
    assert workers_of(more) == [12], "4 workers bring a batch each in 200 ms; computing takes 97 ms"
    busy = {rank: {"process_cores": 0.9, "machine_share": 1.0, "cores": 1} for rank in range(4)}
    full = of(tmp_path / "full", replace(sleepy, sample=busy)).findings[0]
    assert workers_of(full) == [], full
    assert "no core is idle" in full.evidence[0]


def thread_gains(each: Finding) -> list[float]:
    return [fix.gain.seconds for fix in each.fixes if "fd.prefetch" in fix.paste and fix.gain is not None]


def test_a_thread_is_proposed_as_far_as_batches_do_not_compute(tmp_path: Path) -> None:
    """Computing takes 97 ms, a batch 100 ms: what a batch computes holds Python's lock."""
    for cpu, gain in ((0.02, 0.095), (0.5, 0.05), (0.98, None)):
        found = of(tmp_path / f"{cpu}", healthy(**SLOW_DATA, setup=BOUND, data_cpu=cpu)).findings[0]
        assert thread_gains(found) == ([] if gain is None else [pytest.approx(gain, abs=0.004)]), (cpu, found)
        assert found.fixes[0].paste.startswith("num_workers") == (cpu < 0.9 and bool(workers_of(found)))
    trainer = healthy(**SLOW_DATA, setup={**BOUND, "loop": "transformers"}, data_cpu=0.02)
    assert not thread_gains(of(tmp_path / "trainer", trainer).findings[0])


def test_of_a_thread_that_draws_ahead_no_other_is_proposed(tmp_path: Path) -> None:
    """It never rests while it is waited for: a batch takes it the 197 ms of a step."""
    setup = {**BOUND, "loader_prefetch": 2}
    sample = {
        rank: {"process_cores": 0.5, "machine_share": 0.2, "cores": 1, "thread_cores": 0.1} for rank in range(4)
    }
    first = of(tmp_path / "r", healthy(**SLOW_DATA, setup=setup, data_cpu=0.0, sample=sample)).findings[0]
    assert not thread_gains(first)
    assert "a thread of fd.prefetch loads the batches, and computes 10%" in first.evidence[0]
    assert workers_of(first) == [3], "two workers make a batch in 99 ms"
    busy = {rank: {**each, "thread_cores": 0.9} for rank, each in sample.items()}
    first = of(tmp_path / "b", healthy(**SLOW_DATA, setup=setup, data_cpu=0.0, sample=busy)).findings[0]
    assert "CPU time" in first.title
    assert not workers_of(first), "with one core"


def test_one_slow_loader_gets_the_same_proposals(tmp_path: Path) -> None:
    machine = healthy(extra={"data": only(2, 0.1)}, setup=BOUND, data_cpu=0.99, facts={"cores": 4})
    first = of(tmp_path / "r", machine).findings[0]
    assert (first.kind, first.ranks, first.phase) == ("straggler", (2,), "data")
    assert not workers_of(first)
    slept = of(tmp_path / "s", replace(machine, data_cpu=0.0)).findings[0]
    assert workers_of(slept) == [2]
    assert slept.fixes[0].gain is not None
    assert slept.fixes[0].gain.seconds <= slept.seconds


def test_compare_shows_what_came_of_a_promise(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", healthy(**SLOW_DATA, setup=BOUND, data_cpu=0.0))
    after = write_run(
        tmp_path / "after",
        healthy(extra={"data": lambda rank, step: 0.01}, setup={**BOUND, "loader_workers": 2}, data_cpu=0.0),
    )
    compared = compare(before, after)
    (promise,) = compared.promises
    assert promise.promised_seconds == pytest.approx(0.1, rel=0.05)
    assert promise.saved_seconds == pytest.approx(0.09, rel=0.05)
    told = " ".join(compared.to_text().split())
    assert re.search(r"promised for A: .*: saves about 100 ms a step; it saved (89|9\d)[.\d]* ms", told), told
    assert not compare(after, before).promises
    in_vain = write_run(
        tmp_path / "in vain", healthy(**SLOW_DATA, setup={**BOUND, "loader_workers": 2}, data_cpu=0.0)
    )
    told = " ".join(compare(before, in_vain).to_text().split())
    assert re.search(r"saves about 100 ms a step; no difference beyond noise came of it", told), told


def test_larger_batches_are_compared_by_their_samples(tmp_path: Path) -> None:
    """A step of twice the samples that takes as long is not "no difference"."""
    before = write_run(tmp_path / "before", healthy())
    after = write_run(tmp_path / "after", healthy(samples=lambda rank, step: 16))
    compared = compare(before, after)
    assert compared.outcome == "faster"
    assert compared.step is not None
    assert compared.sample is not None
    assert compared.sample.second == pytest.approx(compared.sample.first / 2)
    assert re.search(r"is faster than before: [\d.]+ ms instead of [\d.]+ ms a sample, 50%", compared.to_text())
    assert compare(before, before).sample is None


def test_a_faster_run_that_learns_less_says_so(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", healthy(loss=lambda step: 2.0))
    after = write_run(tmp_path / "after", healthy(loss=lambda step: 2.5, bytes_per_second=1e12))
    assert "Its loss is higher: 2.5 instead of 2 over the last fifth." in compare(before, after).verdict
    assert "loss" not in compare(after, before).verdict
    unlogged = [
        write_run(tmp_path / name, healthy(loss=lambda step: math.nan, facts={"plan": {"sync": sync}}))
        for name, sync in (("each", "every_step"), ("late", "server:staleness=3"))
    ]
    assert "A and B logged no losses: fd.log(loss=loss)" in compare(*unlogged[:2]).to_text()
    assert "note: B logged no losses" in compare(before, unlogged[1]).to_text()
    assert "logged no losses" not in compare(unlogged[0], unlogged[0]).to_text()
    longer = write_run(tmp_path / "longer", healthy(loss=lambda step: 1.0, steps=120))
    assert "loss is higher" not in compare(longer, before).verdict, "a shorter run has seen less"


# -- prices and own code (V2) ---------------------------------------------------------------------


def test_own_code_is_a_finding_with_its_place(tmp_path: Path) -> None:
    found = of(tmp_path / "r", healthy(own_code=lambda rank, step: 0.05))
    first = found.findings[0]
    assert (first.kind, found.bound) == ("other", "script"), to_text(found)
    assert first.seconds == pytest.approx(0.05, rel=0.05)
    assert "between backward and optimizer.step()" in found.verdict
    assert "fd.phase" in first.fixes[0].paste
    assert not of(tmp_path / "none", healthy()).findings, "ordinary loops have none"


def test_own_code_of_some_steps_is_irregular_only(tmp_path: Path) -> None:
    found = of(tmp_path / "r", healthy(steps=106, own_code=every(10, 0.4)))
    assert [each.kind for each in found.findings] == ["irregular"], to_text(found)


@pytest.mark.parametrize(("persistent", "paste"), [(False, "persistent_workers=True"), (True, "fd.phase")])
def test_workers_that_start_anew_are_kept(persistent: bool, paste: str, tmp_path: Path) -> None:
    setup = {"loader_workers": 2, "loader_persistent": persistent}
    late = healthy(steps=106, setup=setup, extra={"data": lambda rank, step: 0.3 * (rank == 1 and step % 10 == 0)})
    first = of(tmp_path / "r", late).findings[0]
    assert (first.kind, first.phase) == ("irregular", "data"), first
    assert paste in first.fixes[0].paste


def test_waiting_for_a_core_costs_no_more_than_there_is_computing(tmp_path: Path) -> None:
    """A sleep of 0.2 s beside 97 ms of computing: a rank that is queued half of the time loses no sleep."""
    tired = {"process_cores": 0.2, "core_wait_share": 0.5, "machine_share": 0.99, "preemptions": 300}
    machine = healthy(own_code=lambda rank, step: 0.2, sample=dict.fromkeys(range(4), tired))
    found = of(tmp_path / "r", machine)
    crowded = finding(found, "oversubscribed")
    assert crowded.seconds <= 0.0985, to_text(found)
    gain = crowded.fixes[0].gain
    assert gain is not None
    assert gain.basis == "computing takes that much longer than the CPU time it uses"


def random_machine(draw: random.Random) -> Machine:
    names = ("data", "forward", "loss", "backward", "optimizer", "checkpoint")
    extra = {
        name: draw.choice(
            [only(draw.randrange(3), draw.uniform(0, 0.2)), every(draw.randint(2, 9), draw.uniform(0, 0.3))]
        )
        for name in draw.sample(names, draw.randint(0, 3))
    }  # fmt: skip
    sample = {
        "process_cores": draw.uniform(0, 2), "core_wait_share": draw.choice([None, draw.uniform(0, 1)]),
        "machine_share": draw.uniform(0, 1), "preemptions": draw.randint(0, 500), "cores": draw.randint(1, 4),
        "major_faults": draw.choice([0, 900]), "swapped_bytes": draw.choice([0, 10**8]),
        "gpu_share": draw.choice([None, draw.uniform(0, 1)]),
    }  # fmt: skip
    setup = {
        "threads": draw.randint(1, 8), "cores": draw.randint(1, 4), "device": "cpu", "optimizer": "AdamW",
        "parameter_tensors": 100, "parameter_elements": 10_000, "loader_workers": draw.randint(0, 3),
    }  # fmt: skip
    return healthy(
        ranks=3, steps=24, extra=extra, sample=dict.fromkeys(range(3), sample), setup=setup,
        own_code=lambda rank, step: 0.01 * (step % 3), bytes_per_second=draw.choice([10e9, 1e8, 3e7]),
        samples=lambda rank, step: 2, data_cpu=draw.random(), exchanges=draw.randint(1, 2),
        seed=draw.randrange(99),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_no_finding_costs_more_than_the_phases_it_can_come_from(seed: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", random_machine(random.Random(seed)))
    table, found = make_step_table(read_run(run, for_diagnosis=True)), diagnose(run)
    room, known = room_of(table), has_phases(table.rows)
    inside = [each for each in found.findings if each.kind != "warm-up"]
    assert sum(each.seconds for each in inside) <= table.step_seconds * (1 + 1e-9)
    for each in inside:
        sources = sources_of(each, known=known)
        there = table.step_seconds if sources is None else sum(room.get(name, 0.0) for name in sources)
        assert each.seconds <= there * (1 + 1e-9), (each.title, room)
        assert all(fix.gain is None or fix.gain.seconds <= each.seconds * (1 + 1e-9) for fix in each.fixes), each


def test_a_cost_takes_from_what_is_left_of_its_parts() -> None:
    def costs(kind: str) -> Finding:
        return Finding(kind, f"{kind}: 500 ms a step (50%)", 0.5, 0.5)

    kept = make_disjoint(
        [costs("optimizer"), costs("small-batch"), costs("input")], 1.0, {"optimizer": 0.2, "data": 0.6}
    )
    assert {each.kind: each.seconds for each in kept} == pytest.approx({"optimizer": 0.2, "input": 0.5})
    assert "200 ms a step (20%)" in kept[0].title


# -- cores and threads (V3, V4) -------------------------------------------------------------------


def test_more_ranks_than_cores_is_the_first_finding(tmp_path: Path) -> None:
    crowd = {"process_cores": 0.25, "core_wait_share": 0.4, "machine_share": 1.0, "preemptions": 300, "cores": 2}
    machine = healthy(
        ranks=8, bytes_per_second=50e6, sample=dict.fromkeys(range(8), crowd),
        setup={"cores": 2, "threads": 1, "core_list": "0-1"},
        facts={"cores": 2, "typed_command": ["farandole", "run", "-np", "8", "--", "python", "t.py"]},
    )  # fmt: skip
    found = of(tmp_path / "r", machine)
    first = found.findings[0]
    assert first.kind == "crowded", to_text(found)
    assert "8 ranks share 2 cores" in found.verdict
    # A rank computes a quarter of the time, so with a core of its own it would need no more.
    assert first.seconds == pytest.approx(0.75 * (found.step_seconds or 0), rel=0.05)
    assert first.fixes[0].paste == "farandole run -np 2 -- python t.py"
    sleepy = replace(machine, sample={rank: {**crowd, "core_wait_share": 0.3} for rank in range(8)})
    crowded = next(each for each in of(tmp_path / "sleepy", sleepy).findings if each.kind == "crowded")
    assert crowded.seconds == pytest.approx(0.3 * (found.step_seconds or 0), rel=0.05), "most of it is no wait"
    assert not any(each.kind == "oversubscribed" for each in found.findings), "they are each other's load"
    assert found.bound == "compute"
    text = to_text(found)
    assert "--no-bind" not in text
    enough = of(tmp_path / "enough", replace(machine, setup={"cores": 8, "core_list": "0-7"}))
    assert not any(each.kind == "crowded" for each in enough.findings)


def test_a_crowd_that_costs_little_is_not_put_before_what_costs_much() -> None:
    def costs(kind: str, seconds: float) -> Finding:
        return Finding(kind, f"{kind}: costs", seconds, seconds)

    crowd, late, link = costs("crowded", 0.1), costs("straggler", 0.39), costs("slow-link", 0.11)
    wire = replace(link, kind="communication", phase="exchange")
    assert with_first([late, crowd], several_hosts=True) == [crowd, late]
    assert with_first([replace(late, seconds=0.41), crowd], several_hosts=True)[1] is crowd
    assert with_first([link, crowd], several_hosts=False) == [link, crowd]
    assert with_first([wire, crowd], several_hosts=True) == [wire, crowd]
    assert with_first([wire, crowd], several_hosts=False) == [crowd, wire]
    inner = replace(link, kind="tensor-communication")
    assert with_first([inner, crowd], several_hosts=True) == [inner, crowd]


def test_jitter_proposes_to_bind_only_where_binding_was_refused(tmp_path: Path) -> None:
    late = {"forward": lambda rank, step: 0.08 if (rank + step) % 4 == 0 else 0.0}
    typed = ["farandole", "run", "-np", "4", "--no-bind", "--", "python", "t.py"]
    loose = finding(of(tmp_path / "a", healthy(extra=late, facts={"typed_command": typed})), "jitter")
    assert loose.fixes[0].paste == "farandole run -np 4 -- python t.py"
    bound = finding(
        of(tmp_path / "b", healthy(extra=late, facts={"typed_command": typed[:4] + typed[5:]})), "jitter"
    )
    assert "bind" not in bound.fixes[0].what


def test_more_threads_than_cores_is_first(tmp_path: Path) -> None:
    found = of(tmp_path / "r", healthy(setup={"threads": 8, "cores": 1, "device": "cpu"}))
    first = found.findings[0]
    assert (first.kind, first.fixes[0].paste) == ("threads", "torch.set_num_threads(1)")
    assert "8 threads on 1 core" in found.verdict
    fine = of(tmp_path / "f", healthy(setup={"threads": 2, "cores": 2, "device": "cpu"}))
    assert not fine.findings


# -- what was not seen (V5), figures that make no sense (V6), few steps (P7) -----------------------


def test_communication_that_was_not_seen_is_unknown_everywhere(tmp_path: Path) -> None:
    machine = healthy(exchanges_are_seen=False)
    path = write_run(tmp_path / "r", machine)
    summary, found = summarise(path), diagnose(path)
    assert summary.shares is not None
    assert summary.shares["communication"] is None
    assert summary.sent_bytes_per_step is None
    assert "exposed communication unknown" in summary.to_text()
    assert "waiting for others unknown" in summary.to_text()
    assert not {"communication", "waiting"} & set(found.parts)
    assert any("DistributedDataParallel" in note for note in found.notes)
    waits = replace(machine, own_code=lambda rank, step: 0.05)
    assert not any(each.kind == "other" for each in of(tmp_path / "w", waits).findings), "it may be the exchange"
    shown = {name: value for name, value, _ in page.figures(report_run.read(path))}
    assert shown["exposed communication"] == "unknown"
    compared = compare(path, write_run(tmp_path / "seen", healthy()))
    assert "communication" not in {part.name for part in compared.parts}
    assert any(note.startswith("A: no exchange") for note in compared.notes)
    alone = summarise(write_run(tmp_path / "alone", healthy(ranks=1)))
    assert (alone.shares or {})["communication"] == 0.0, "one rank has nothing to exchange"


def test_a_model_that_all_ranks_divide_has_no_gradients_to_exchange(tmp_path: Path) -> None:
    for replicas, known in ((1, True), (2, False)):
        machine = healthy(exchanges_are_seen=False, setup={"replicas": replicas})
        path = write_run(tmp_path / f"{replicas}", machine)
        summary, found = summarise(path), diagnose(path)
        assert ((summary.shares or {})["communication"] == 0.0) is known, replicas
        assert any("DistributedDataParallel" in note for note in (*summary.notes, *found.notes)) is not known
        assert not any("buckets" in note for note in found.notes), "there are none, or nothing is known of them"
        assert "sent by a rank" not in summary.to_text(), "activations are not counted"


def test_an_efficiency_above_one_is_explained() -> None:
    assert describe_efficiency(0.93) == "efficiency 0.93"
    assert "differ" in describe_efficiency(1.13)


def test_a_link_that_no_link_can_be_is_not_told(tmp_path: Path) -> None:
    for rate, told in ((60e9, False), (1e9, True)):
        sizes = (40_000_000, 1_000_000, 20_000_000, 4_000_000)
        machine = healthy(bytes_per_second=rate, latency_seconds=5e-3, ranks=2, bucket_bytes=sizes, noise=0)
        found = of(tmp_path / f"{rate}", machine)
        text = " ".join(line for each in found.findings for line in each.evidence)
        assert ("a second" in text) is told, text


@pytest.mark.parametrize(("elements", "share"), [(8_000_000, 1 / 2), (5_333_333, 1 / 3), (None, 1 / 3)])
def test_at_stage_3_gradients_are_the_share_of_what_was_sent(
    elements: int | None, share: float, tmp_path: Path
) -> None:
    setup = {"zero": 3, "codec": "none", "weight_codec": "none", "shard_within": "world"}
    machine = healthy(bytes_per_second=200e6, plan={"zero": 3}, setup={**setup, "parameter_elements": elements})
    first = of(tmp_path / "r", machine).findings[0]
    gains = {next(iter(fix.changes)): fix.gain.seconds / first.seconds for fix in first.fixes if fix.gain}
    assert gains["weight_codec"] == pytest.approx(0.74 * (1 - share), rel=1e-3)
    assert gains["codec"] == pytest.approx(0.74 * share, rel=1e-3)
    assert gains.get("zero", 0.0) == pytest.approx(1 - 2 * share, rel=1e-3), "as often as gradients"


@pytest.mark.parametrize(
    ("plan", "codecs"),
    [
        ({"zero": 2}, ["int4", "int8", "bf16"]),
        ({}, ["int4", "int8", "powersgd:rank=4", "bf16"]),
        ({"sync": "async"}, []),
    ],
)
def test_only_keys_that_the_plan_takes_are_proposed(
    plan: dict[str, Any], codecs: list[str], tmp_path: Path
) -> None:
    machine = healthy(bytes_per_second=50e6, plan=plan, parameters=("w",))
    fixes = of(tmp_path / "r", machine).findings[0].fixes
    assert [fix.changes["codec"] for fix in fixes if fix.changes.get("codec", "auto") != "auto"] == codecs
    assert all("codec=auto" not in fix.paste for fix in fixes) is bool(plan)


def test_a_rhythm_of_every_step_is_none() -> None:
    assert period_of([4, 5, 6, 7, 9]) is None
    assert period_of([5, 10, 15, 25]) == 5


def test_a_slow_start_has_no_share_above_one(tmp_path: Path) -> None:
    found = of(tmp_path / "r", healthy(steps=60, first_step_factor=300.0))
    start = finding(found, "warm-up")
    assert "%" not in start.title, start.title
    assert "more than the" in start.title


@pytest.mark.parametrize(
    ("steps", "factor", "is_found", "is_told"),
    [(25, 3.0, False, False), (25, 60.0, True, True), (60, 2.5, True, False), (60, 10.0, True, True),
     (400, 60.0, True, True)],
)  # fmt: skip
def test_a_slow_start_is_a_fact_beside_the_verdict(
    steps: int, factor: float, is_found: bool, is_told: bool, tmp_path: Path
) -> None:
    found = of(tmp_path / "r", healthy(steps=steps, first_step_factor=factor))
    assert found.bound == "compute"
    assert found.verdict.startswith("Compute-bound: "), found.verdict
    assert ("warm-up" in {each.kind for each in found.findings}) is is_found, found.findings
    assert ("; the start is slow: " in found.verdict) is is_told, found.verdict
    assert found.worst_share() < 0.1, "a job that fails over a share of a step does not fail for its start"


def test_figures_of_few_steps_say_so_where_they_stand(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", healthy(steps=5))
    assert "(from 2 of 5 steps)" in diagnose(path).verdict
    assert "(from 2 of 5 steps)" in summarise(path).to_text()
    assert "from 2 of 5 steps" in page.figures(report_run.read(path))[0][2]
    assert "steps)" not in diagnose(write_run(tmp_path / "long", healthy())).verdict


# -- optimizer, batch, pauses (V7) ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "paste", "saves"),
    [
        ({}, "fused=True", 0.61),
        ({"threads": 1}, "fused=True", 0.71),
        ({"threads": 1, "optimizer": "Adagrad"}, "fused=True", 0.62),
        ({"optimizer": "SGD", "optimizer_momentum": True}, "fused=True", 0.46),
        ({"optimizer": "SGD", "optimizer_momentum": False}, None, 0),
        ({"optimizer": "SGD"}, None, 0),
        ({"optimizer": "RMSprop"}, "foreach=True", 0.25),
        ({"optimizer_fused": True}, None, 0),
        ({"optimizer": "SGD", "optimizer_momentum": True, "parameter_elements": 10**8}, None, 0),
        ({"device": "cuda"}, None, 0),
    ],
)
def test_an_unfused_optimizer(changes: Mapping[str, Any], paste: str | None, saves: float, tmp_path: Path) -> None:
    setup = {
        "device": "cpu", "optimizer": "AdamW", "parameter_tensors": 600, "parameter_elements": 38_400,
        "optimizer_fused": None, "optimizer_foreach": None, **changes,
    }  # fmt: skip
    machine = healthy(setup=setup, extra={"optimizer": lambda rank, step: 0.05})
    found = [each for each in of(tmp_path / "r", machine).findings if each.kind == "optimizer"]
    assert bool(found) is (paste is not None)
    for each in found:
        assert each.seconds == pytest.approx(saves * 0.056, rel=0.05)
        assert each.fixes[0].paste.startswith(str(paste))


def test_unequal_experts_cost_what_their_rank_takes_longer(tmp_path: Path) -> None:
    setup: dict[str, Any] = {
        "expert_layer": "layers.1.moe", "experts": 8, "expert_busiest": 3, "expert_imbalance": 3.1,
        "expert_dropped": 0.0, "expert_seconds": 0.010,
    }  # fmt: skip
    busy = {**setup, "expert_seconds": 0.050}
    found = of(tmp_path / "r", healthy(setup=setup, setup_of={1: busy}))
    experts = finding(found, "experts")
    assert experts.ranks == (1,), f"{experts}"
    assert experts.seconds == pytest.approx(0.050 - 0.020, rel=0.01), "less than the mean of the four ranks"
    assert "expert 3 of layers.1.moe gets 3.1 times the mean of its 8 experts" in experts.evidence[0]
    assert "farandole.router_loss(model, balance=0.05)" in experts.fixes[0].paste
    even = of(tmp_path / "e", healthy(setup=setup))
    assert not any(each.kind == "experts" for each in even.findings), "no rank waits"
    assert any("gets 3.1 times the mean" in note for note in even.notes), "it is said all the same"
    calm = of(tmp_path / "c", healthy(setup={**setup, "expert_imbalance": 1.2}, setup_of={1: busy}))
    assert not any("experts" in note for note in calm.notes), f"{calm.notes}"


def test_a_batch_of_one_is_too_small(tmp_path: Path) -> None:
    machine = healthy(
        samples=lambda rank, step: 1, extra={"optimizer": lambda rank, step: 0.05}, bytes_per_second=5e8
    )
    small = finding(of(tmp_path / "r", machine), "small-batch")
    assert small.fixes[0].changes == {"loader_batch": 4}
    fine = of(tmp_path / "f", replace(machine, samples=lambda rank, step: 64))
    assert not any(each.kind == "small-batch" for each in fine.findings)


def test_saving_often_gets_a_gain_that_rarer_saving_has(tmp_path: Path) -> None:
    found = of(tmp_path / "r", healthy(steps=106, extra={"checkpoint": every(5, 0.4)}))
    pause = finding(found, "pause")
    rarer = next(fix for fix in pause.fixes if "every 20 steps instead of 5" in fix.what)
    assert rarer.gain is not None, "rarer saving has a gain"
    assert rarer.gain.seconds == pytest.approx(0.75 * pause.seconds), f"{rarer.gain}"


# -- one number (C4) ------------------------------------------------------------------------------


def test_summary_headline_table_and_page_show_one_number(tmp_path: Path) -> None:
    machine = healthy(bytes_per_second=200e6, late_end={1: 0.01, 3: 0.004}, noise=0.1, steps=40)
    path = write_run(tmp_path / "r", machine)
    summary, found = summarise(path), diagnose(path)
    text, shown = (
        to_text(found),
        {name: (value, word) for name, value, word in page.figures(report_run.read(path))},
    )
    shares, step = summary.shares or {}, summary.mean_step_seconds or 0.0
    assert step == pytest.approx(found.step_seconds)
    exposed = shares["communication"]
    assert exposed is not None
    assert found.parts["communication"] == pytest.approx(exposed * step)
    assert found.findings[0].seconds == pytest.approx(found.parts["communication"])
    percent = f"{exposed:.0%}"
    assert f"({percent} of" in found.verdict
    assert re.search(rf"exposed communication +[\d.]+ ms +{percent}", text)
    assert f"exposed communication {percent}" in summary.to_text()
    assert shown["exposed communication"][0] == percent
    (length,) = set(re.findall(r"of (\d+ ms)", found.verdict)) | set(re.findall(r"^step of (\d+ ms)", text, re.M))
    assert f"{length} mean" in summary.to_text()
    assert shown["step, mean"][0] == length
    assert compare(path, path).step.first == pytest.approx(step)  # type: ignore[union-attr]


def test_no_proposed_command_has_literal_dots(tmp_path: Path) -> None:
    machines = [healthy(bytes_per_second=5e7), healthy(exchanges=2, bytes_per_second=4e8), healthy(**SLOW_DATA)]
    for number, machine in enumerate(machines):
        for each in of(tmp_path / str(number), machine).findings:
            for fix in each.fixes:
                assert "..." not in fix.paste, fix
                if "farandole " in fix.paste:
                    assert fix.paste.endswith("python t.py"), fix.paste


def test_fewer_exchanges_are_proposed_as_the_loop_can_make_them(tmp_path: Path) -> None:
    """A plan's `accumulate` joins passes before a step, and this loop steps after each."""
    slow = healthy(bytes_per_second=5e7)
    unknown = finding(of(tmp_path / "u", slow), "communication")
    known = finding(of(tmp_path / "k", replace(slow, setup={"loader_batch": 16})), "communication")
    for each in (unknown, known):
        assert not any("accumulate" in fix.changes for fix in each.fixes), each.fixes
    assert any(fix.paste.startswith("with fd.accumulate((i + 1) % 2 > 0):") for fix in unknown.fixes)
    assert any(fix.changes == {"loader_batch": 32} for fix in known.fixes)
    four = finding(of(tmp_path / "f", replace(slow, exchanges=4)), "extra-exchange")
    assert four.fixes[0].changes == {"accumulate": 4}


def test_each_of_two_optimizers_needs_an_exchange(tmp_path: Path) -> None:
    """As in a GAN: its steps are told by one of them."""
    two = healthy(exchanges=3, optimizers=2, bytes_per_second=4e8)
    extra = finding(of(tmp_path / "three", two), "extra-exchange")
    assert "3 times a step where 2 times are enough" in extra.title
    assert extra.fixes[0].changes == {}
    assert extra.fixes[0].paste.startswith("with fd.accumulate():")
    enough = of(tmp_path / "two", replace(two, exchanges=2))
    assert not any(each.kind == "extra-exchange" for each in enough.findings)


def test_a_batch_is_what_the_loader_says(tmp_path: Path) -> None:
    """Four passes of several models over 16 samples are no batch of 4."""
    machine = healthy(
        samples=lambda rank, step: 16, exchanges=4, bytes_per_second=5e8, setup={"loader_batch": 16},
        extra={"optimizer": lambda rank, step: 0.05},
    )  # fmt: skip
    assert not any(each.kind == "small-batch" for each in of(tmp_path / "r", machine).findings)


def test_a_thread_that_holds_the_interpreter_is_named(tmp_path: Path) -> None:
    quiet = {"process_cores": 1.0, "machine_share": 0.5, "preemptions": 1}
    samples = {rank: {**quiet, "thread_cores": 0.6 if rank == 1 else 0.01} for rank in range(4)}
    machine = healthy(
        steps=150, extra={"backward": lambda rank, step: 0.02 + 0.06 * (step % 3 == 0) if rank == 1 else 0.0},
        sample=samples, setup={"cores": 8}, setup_of={1: {"busy_thread": "hog at train.py:4"}},
    )  # fmt: skip
    first = of(tmp_path / "r", machine).findings[0]
    assert (first.kind, first.ranks) == ("straggler", (1,))
    assert "while a thread (hog at train.py:4) holds Python's lock" in first.title
    assert "computes 60% of the time" in first.evidence[-1]
    assert first.seconds == pytest.approx(0.04, rel=0.1), "the mean, not the usual 0.02"
    assert "multiprocessing" in first.fixes[0].what
    loading = of(tmp_path / "l", replace(machine, extra={"data": machine.extra["backward"]})).findings[0]
    assert "holds Python's lock" in loading.title, "its data comes late for the same reason"
    assert len(loading.fixes) == 1, "no workers help"
    alike = replace(machine, sample={rank: {**quiet, "thread_cores": 0.6} for rank in range(4)})
    assert "thread" not in of(tmp_path / "a", alike).findings[0].title, "all ranks have one"


def test_ranks_that_are_kept_on_one_core_of_several_get_the_others(tmp_path: Path) -> None:
    crowd = {"process_cores": 0.5, "core_wait_share": 0.4, "machine_share": 0.5, "preemptions": 300, "cores": 1}
    machine = healthy(
        ranks=2, sample=dict.fromkeys(range(2), crowd), setup={"cores": 1, "threads": 1, "core_list": "0"}
    )
    first = of(tmp_path / "r", machine).findings[0]
    assert first.kind == "crowded"
    assert "let the ranks use all 8 cores" in first.fixes[0].what
    assert first.fixes[0].paste == "", "no number of ranks is at fault"


@pytest.mark.parametrize(("children", "is_cpu_work"), [(0.1, False), (1.8, True), (None, True)])
def test_workers_that_sleep_are_no_cpu_work_on_a_busy_machine(
    children: float | None, is_cpu_work: bool, tmp_path: Path
) -> None:
    sample = {"process_cores": 1.0, "machine_share": 0.99, "preemptions": 1, "cores": 8}
    sample |= {} if children is None else {"children_cores": children}
    machine = healthy(
        **SLOW_DATA, steps=150, sample=dict.fromkeys(range(4), sample),
        setup={"loader_workers": 2, "cores": 2, "threads": 1},
    )  # fmt: skip
    waits = finding(of(tmp_path / "r", machine), "input")
    assert any("no core is idle" in line for line in waits.evidence) == is_cpu_work
    assert any("they wait for a disk, a network or a lock" in line for line in waits.evidence) != is_cpu_work
    assert any(fix.paste.startswith("num_workers=") for fix in waits.fixes) != is_cpu_work


def test_what_a_script_does_around_its_evaluation_on_one_rank_is_said_so(tmp_path: Path) -> None:
    machine = healthy(
        steps=150, extra={"evaluation": every(10, 0.1, rank=0)},
        own_code=lambda rank, step: 0.3 if rank == 0 and step % 10 == 0 else 0.0,
    )  # fmt: skip
    found = of(tmp_path / "r", machine)
    assert finding(found, "pause").title.startswith("evaluation on rank 0 alone stops the steps")
    around = finding(found, "irregular")
    assert "these are the steps with evaluation, whose own time is not counted in it" in around.evidence
    assert around.fixes[0].what == "do less around evaluation in the script, or evaluation less often"
    assert around.ranks == (0,)
    other = of(tmp_path / "o", replace(machine, own_code=lambda rank, step: 0.3 * (rank == 0 and step % 7 == 0)))
    assert 'with fd.phase("name"):' in finding(other, "irregular").fixes[0].paste


@pytest.mark.full("further")
def test_the_bucket_size_that_the_plan_has_is_not_proposed(tmp_path: Path) -> None:
    small = healthy(bucket_bytes=(30_000, 10_000) * 100, latency_seconds=1e-3, bytes_per_second=1e9)
    proposed = finding(of(tmp_path / "r", small), "small-buckets").fixes[0].changes["bucket_bytes"]
    held = replace(small, plan={"bucket_bytes": parse_bytes(proposed)})
    fixes = [fix for each in of(tmp_path / "h", held).findings for fix in each.fixes]
    assert proposed not in [fix.changes.get("bucket_bytes") for fix in fixes]


@pytest.mark.parametrize(("setup", "mib"), [({}, 4), ({"device": "cpu"}, 4), ({"device": "cuda"}, 25)])
def test_a_size_of_buckets_that_a_plan_leaves_open_is_that_of_the_device(setup: dict[str, str], mib: int) -> None:
    assert bucket_bytes_of(setup, {"bucket_bytes": 0}) == mib << 20
    assert bucket_bytes_of(setup, {"bucket_bytes": 1 << 20}) == 1 << 20
    assert bucket_bytes_of(setup, {}) is None
    assert _is_set({**setup, "bucket_bytes": 0}, "bucket_bytes", f"{mib}MiB")
    assert not _is_set({**setup, "bucket_bytes": 0}, "bucket_bytes", "8MiB")

"""``farandole bench scaling``: a user's own script at several sizes, round by round, and what scaling it costs."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import FarandoleError
from ...core.vocabulary.run_files import hide_secrets
from ...observe.figures.figures import efficiency
from ..measure.intervals import nested_interval, nested_ratio
from ..measure.launch_ranks import STOPPED, Say, remove_unless_failed, run_here
from ..measure.machine import busy_note, machine_facts
from .cases import STRONG, ScalingCase, ScalingPlans, make_cases
from .run import MeasuredRun, read_measured

Run = tuple[int, tuple[str, ...], tuple[str, ...]]
"""Ranks, command and changes of the plan: cases of two modes may share one."""
Runs = dict[Run, list[MeasuredRun]]


def to_words(result: dict[str, Any]) -> list[str]:
    """Return the command that makes such a result, with what `bench_scaling` was given."""
    words = ["farandole", "bench", "scaling", "--np", ",".join(map(str, result["sizes"]))]
    words += ["--rounds", str(result["rounds"]), "--mode", result["mode"]]
    for option, value in (("--batch", result["batch"]), ("--hosts", result["hosts"])):
        words += [] if value is None else [option, str(value)]
    words += ["--compare", " ".join(result["changes"])] if result["changes"] else []
    return [*words, *result["plan"], "--", *result["command"]]


def bench_scaling(
    command: Sequence[str], *, sizes: Sequence[int], rounds: int, mode: str, batch: int | None,
    hosts: str | None, plans: ScalingPlans | None = None, say: Say,
) -> dict[str, Any]:  # fmt: skip
    """Measure; return the result as plain values.

    Every round runs each size once, every other round from the largest to the smallest, so that a machine that
    slows down favours no size. A size that fails in any round is run no more and gets no numbers; its reason is in
    ``failed``. Raises the first `FarandoleError` when all sizes fail, and when a run was interrupted.
    """
    plans = plans or ScalingPlans()
    cases = make_cases(command, sizes, mode, batch, plans.changes)
    facts = machine_facts()
    runs: Runs = {}
    for case in cases:
        runs.setdefault(_run_of(case), [])
    failed: dict[Run, FarandoleError] = {}
    for round_ in range(rounds):
        for run in runs if round_ % 2 == 0 else reversed(runs):
            if run in failed:
                continue
            ranks, words, also = run
            size = f"{ranks} rank{'s' * (ranks > 1)}{_with(also)}"
            say(f"round {round_ + 1} of {rounds}: {size}: {' '.join(words)}")
            settings = [part for change in also for part in ("--set", change)]
            try:
                runs[run].append(_run(ranks, words, hosts, [*plans.words, *settings]))
            except FarandoleError as problem:
                if problem.exit_code in STOPPED:
                    raise
                failed[run] = problem
                say(f"no numbers for {size}: {problem.message}")
    if len(failed) == len(runs):
        raise next(iter(failed.values()))
    found = compare([case for case in cases if _run_of(case) not in failed], runs)
    note = busy_note(facts)
    return {
        "machine": facts, "command": hide_secrets(command), "sizes": list(sizes), "mode": mode, "batch": batch,
        "hosts": hosts, "plan": list(plans.words), "changes": list(plans.changes), "rounds": rounds, "rows": found,
        "failed": _failures(cases, failed),
        "notes": [*([note] if note else []), *_notes(found, hosts)],
    }  # fmt: skip


def _run_of(case: ScalingCase) -> Run:
    return case.ranks, case.command, case.changes


def _with(changes: Sequence[str]) -> str:
    return f" with {' '.join(changes)}" if changes else ""


def _failures(cases: Sequence[ScalingCase], failed: dict[Run, FarandoleError]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        problem = failed.get(_run_of(case))
        if problem is not None:
            reason = problem.message + _with(case.changes)
            found.append({"mode": case.mode, "ranks": case.ranks, "reason": reason})
    return found


def _run(ranks: int, words: Sequence[str], hosts: str | None, plan: Sequence[str]) -> MeasuredRun:
    directory = Path(tempfile.mkdtemp(prefix="farandole-scaling-"))
    code = 0
    try:
        run = directory / "run"
        command = [sys.executable, "-m", "farandole", "run", "--quiet", "--run-dir", str(run), "-np", str(ranks)]
        code = run_here([*command, *(["-H", hosts] if hosts else []), *plan, "--", *words])
        if code:
            problem = FarandoleError(
                f"the script failed on {ranks} rank(s) (exit code {code})", remedy="what it said is above"
            )
            problem.exit_code = code if code > 128 else 1
            raise problem
        return read_measured(run)
    finally:
        remove_unless_failed(directory, code)


def compare(cases: Sequence[ScalingCase], runs: Runs) -> list[dict[str, Any]]:
    """Return a row for each case, compared with the smallest size of its mode, without changes of the plan."""
    rows = []
    for case in cases:
        alike = [other for other in cases if other.mode == case.mode]
        base = min(alike, key=lambda other: (bool(other.changes), other.ranks))
        own, first = runs[_run_of(case)], runs[_run_of(base)]
        rows.append(
            {"mode": case.mode, "ranks": case.ranks, "changes": list(case.changes), **_figures(own),
             **_scaling(case, base, own, first)}
        )  # fmt: skip
    return rows


def _figures(own: Sequence[MeasuredRun]) -> dict[str, Any]:
    seconds, seconds_interval = nested_interval([run.step_seconds for run in own])
    rate: tuple[float | None, tuple[float, float] | None] = (None, None)
    if all(run.rates for run in own):
        rate = nested_interval([run.rates for run in own])
    return {
        "step_seconds": seconds, "step_interval": seconds_interval,
        "samples_per_second": rate[0], "rate_interval": rate[1],
        "training_seconds": statistics.median(run.training_seconds for run in own),
        "steps": own[0].steps, "warm_up_steps": max(run.warm_up_steps for run in own),
        "steady": all(run.steady for run in own),
        "shares": {name: statistics.median(run.shares[name] for run in own) for name in own[0].shares},
        "load_deviation": _median([run.load_deviation for run in own]),
        "busy_cores": _median([run.busy_cores for run in own]),
        "accelerator_share": _median([run.accelerator_share for run in own]),
        "resident_bytes": max((run.resident_bytes for run in own if run.resident_bytes is not None), default=None),
        "runs": [run.to_mapping() for run in own],
    }  # fmt: skip


def _scaling(
    case: ScalingCase, base: ScalingCase, own: Sequence[MeasuredRun], first: Sequence[MeasuredRun]
) -> dict[str, Any]:
    """Return speedup and efficiency, by rates where samples are known, else by the times of steps."""
    if case == base:
        gain, interval = 1.0, (1.0, 1.0)
    elif all(run.rates for run in [*own, *first]):
        gain, interval = nested_ratio([run.rates for run in own], [run.rates for run in first])
    else:
        # A weak step does as many times more work as there are ranks; a strong one always the same.
        work = 1.0 if case.mode == STRONG else case.ranks / base.ranks
        gain, interval = nested_ratio([run.step_seconds for run in first], [run.step_seconds for run in own])
        gain, interval = gain * work, (interval[0] * work, interval[1] * work)
    larger = case.ranks / base.ranks
    return {
        "speedup": gain, "speedup_interval": interval,
        "efficiency": efficiency(gain, larger),
        "efficiency_interval": (efficiency(interval[0], larger), efficiency(interval[1], larger)),
        "beside_ranks": base.ranks,
    }  # fmt: skip


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _notes(rows: Sequence[dict[str, Any]], hosts: str | None) -> list[str]:
    notes = []
    if hosts is None and all(row["accelerator_share"] is None for row in rows):
        cores = len(os.sched_getaffinity(0))
        each = ", ".join(f"{cores / ranks:.3g} with {ranks}" for ranks in sorted({row["ranks"] for row in rows}))
        notes.append(f"the ranks share the cores of this host, so that more ranks have fewer each: {each}")
    unsteady = sorted({row["ranks"] for row in rows if not row["steady"]})
    if unsteady:
        names = ", ".join(map(str, unsteady))
        notes.append(f"step times still drift, or are too few to tell, with {names} rank(s): train longer")
    if any(row["samples_per_second"] is None for row in rows):
        notes.append("samples are unknown (use fd.shard, or fd.log(samples=...)): speedup is by times of steps")
    return notes

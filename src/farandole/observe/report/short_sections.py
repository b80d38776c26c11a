"""Sections of a few lines: what to do, the prediction, tuning, balance, the plan, and where the run ran."""

from __future__ import annotations

import json
import shlex
from typing import Any

from .. import diagnose
from ..figures.figures import standard_deviation
from ..figures.summary import describe_setting, read_tuning, trial_rows, verdict_of
from .content import (
    Block,
    Code,
    Figures,
    FindingBlock,
    Fold,
    Pairs,
    Remedy,
    Run,
    Section,
    Table,
    Text,
    mean_parts,
    number,
    percent,
    plural,
    seconds,
)

MOST_ROWS = 80
MOST_CHARACTERS = 2000


def make(run: Run) -> Section:
    """Return the plan and the environment."""
    blocks: list[Block] = []
    plan = run.facts.get("plan")
    if isinstance(plan, dict) and plan:
        blocks.append(
            Fold("Plan", [Pairs([(str(key), _text(value)) for key, value in list(plan.items())[:MOST_ROWS]])])
        )
    else:
        blocks.append(Text("The plan is unknown.", quiet=True))
    blocks.append(Pairs(_environment(run)))
    return Section("environment", "Plan and environment", blocks)


def _environment(run: Run) -> list[tuple[str, str]]:
    facts = run.facts
    rows = []
    if facts:
        command = facts.get("command")
        words = [str(word) for word in command] if isinstance(command, list) else []
        rows += [
            ("command", shlex.join(words) if words else "unknown"),
            ("started", str(facts.get("started", "unknown"))),
            ("hosts", _hosts(_hosts_of(run))),
            ("cores", str(facts.get("cores", "unknown"))),
            ("congestion control", str(facts.get("congestion_control") or "unknown")),
            ("commit", str(facts.get("commit") or "none")),
        ]
        versions = facts.get("versions")
        if isinstance(versions, dict):
            rows += [(str(name), _text(value)) for name, value in list(versions.items())[:MOST_ROWS]]
    elif run.timelines:
        hosts = sorted({str(timeline.started.host) for timeline in run.timelines})
        rows += [("started", str(run.timelines[0].started.wall_time)), ("hosts", _hosts(hosts))]
    return [(name, text[:MOST_CHARACTERS]) for name, text in rows]


def _hosts_of(run: Run) -> Any:
    """Return those that ranks ran on; an inner launcher of several knows its own host only."""
    told = run.facts.get("hosts")
    seen = list(dict.fromkeys(str(timeline.started.host) for timeline in run.timelines))
    return told if isinstance(told, list) and len(told) >= len(seen) else seen


def _hosts(hosts: Any) -> str:
    names = [str(host) for host in hosts] if isinstance(hosts, list) else []
    more = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return ", ".join(names[:16]) + more if names else "unknown"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:MOST_CHARACTERS]


# What to do: each finding with its cost, its evidence, the fix to paste and what that should gain.


SHOWN = 3
MOST = 12


def make_fixes(run: Run) -> Section | None:
    """Return the findings, costliest first; those after the third are folded."""
    findings = run.diagnosis.findings
    if not run.timelines:
        return None
    if not findings:
        return Section("fixes", "What to do", (), "Nothing was found that costs more than noise.")
    shown: list[Block] = [_finding(finding) for finding in findings[:SHOWN]]
    rest = [_finding(finding) for finding in findings[SHOWN:MOST]]
    if rest:
        shown.append(Fold(f"{plural(len(rest), 'smaller finding')}", rest))
    return Section("fixes", "What to do", shown)


def _finding(finding: diagnose.Finding) -> FindingBlock:
    remedies = [
        Remedy(
            fix.what, fix.paste, "" if fix.gain is None else f"{seconds(fix.gain.seconds)} a step",
            "" if fix.gain is None else fix.gain.basis,
        )
        for fix in finding.fixes
    ]  # fmt: skip
    cost = f"{seconds(finding.seconds)} a step"
    return FindingBlock(
        finding.title, cost, percent(finding.share), finding.confidence, finding.evidence, remedies
    )


# What the plan predicted, beside what was measured.


def make_predicted(run: Run) -> Section | None:
    """Return the table of terms; None of a run whose plan predicts nothing."""
    check = run.summary.prediction
    if check is None:
        return None
    blocks: list[Block] = [
        Table(
            ["term", "predicted", "measured", "ratio", ""],
            check.rows(),
            note="A step, mean over the ranks and the steps after the warm-up. Exchanges count as far as nothing "
            "hides them; the terms and what nothing predicts add up to the step.",
        )
    ]
    blocks += [Text(note) for note in check.notes]
    if check.remedy:
        blocks += [Text(f"{check.advice()}."), Code(check.remedy)]
    lead = {
        True: "The step is within the predicted interval.",
        False: "The step is outside of the predicted interval.",
        None: "",
    }[check.is_inside]
    return Section("predicted", "Predicted against measured", blocks, lead)


# What ``farandole tune`` tried while the run went on, and what came of it.


_HEAD = ("after step", "tried", "gain, 95 % interval", "verdict")


def make_tuning(run: Run) -> Section | None:
    """Return the trials; None of a run that was not tuned."""
    tuning = read_tuning(run.directory)
    if tuning is None:
        return None
    blocks: list[Table | Pairs | Text] = []
    rows = trial_rows(tuning)
    if rows:
        blocks.append(Table(_HEAD, rows, texts=len(_HEAD), note="A trial is compared with the steps around it."))
    if "best" in tuning:
        named = [("at first", describe_setting(tuning["start"])), ("at last", describe_setting(tuning["best"]))]
        blocks.append(Pairs([*named, ("stopped", str(tuning["stopped"]))]))
    blocks += [Text(str(text), quiet=True) for text in (*tuning["notes"], *tuning.get("loader", ()))]
    return Section("tuning", "Tuning", blocks, verdict_of(tuning))


# How evenly the work is spread over the ranks.


def make_balance(run: Run) -> Section | None:
    """Return the figures; None with fewer than two ranks."""
    if len(run.timelines) < 2:
        return None
    computes = [mean_parts(own)["compute"] for own in run.counted_parts]
    mean = sum(computes) / len(computes)
    deviation = standard_deviation(computes)
    slowest = max(range(len(computes)), key=lambda i: computes[i])
    samples = [sum(row.samples for row in own) / max(1, len(own)) for own in run.counted]
    rows = [
        (
            "standard deviation of compute", seconds(deviation),
            f"{percent(deviation / mean)} of the mean" if mean > 0 else "",
        ),
        ("mean compute", seconds(mean), "a step, over the ranks"),
        (
            "slowest rank", seconds(computes[slowest]),
            f"rank {run.ranks[slowest]}" + (f", {computes[slowest] / mean:.2f}x the mean" if mean > 0 else ""),
        ),
    ]  # fmt: skip
    if any(samples):
        even = max(samples) - min(samples) <= 0.005 * max(samples)
        most = max(range(len(samples)), key=lambda i: samples[i])
        note = "all ranks alike" if even else f"rank {run.ranks[most]} has most, {number(max(samples))}"
        rows.append(("samples of a rank", number(sum(samples) / len(samples)), f"a step; {note}"))
    lead = ""
    if mean > 0:
        lead = f"With even work, the slowest rank would compute {seconds(max(computes) - mean)} less a step."
    return Section("balance", "Load balance", [Figures(rows)], lead)

"""``farandole bench scaling``: a user's own script at several sizes, round by round, and what scaling it costs."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import ConfigError, DataError, FarandoleError
from ..core.vocabulary.run_files import hide_secrets, write_asked
from ..core.vocabulary.text import format_table
from ..core.vocabulary.units import format_bytes, format_rate, format_seconds
from ..observe.figures.figures import efficiency, standard_deviation, throughput
from ..observe.figures.step_parts import shares_of, step_parts
from ..observe.records.run_reader import read_run
from ..observe.records.timeline_reader import RankTimeline
from .intervals import nested_interval, nested_ratio
from .launch_ranks import STOPPED, Say, remove_unless_failed, run_here
from .machine import busy_note, machine_facts, machine_line

# Which runs the scaling benchmark makes: the user's command at each size, weak and strong.

WEAK, STRONG = "weak", "strong"
MODES = (WEAK, STRONG, "both")
BATCH, NP = "{batch}", "{np}"
MOST_RANKS = 4096


@dataclass(frozen=True)
class ScalingCase:
    """One command at one size."""

    mode: str
    ranks: int
    command: tuple[str, ...]
    changes: tuple[str, ...] = ()
    """What the plan has besides: ``KEY=VALUE``, each."""


@dataclass(frozen=True)
class ScalingPlans:
    """What the runs have in their plan."""

    words: tuple[str, ...] = ()
    """Options of ``farandole run`` that set the plan of all runs."""
    changes: tuple[str, ...] = ()
    """``KEY=VALUE``, each: set besides in a second run of each size."""


def read_sizes(text: str) -> list[int]:
    """Read ``1,2,4``: numbers of ranks, each once, in order. Raises `ConfigError`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise ConfigError(
            f"--np {text!r}: expected numbers of ranks, 1 to {MOST_RANKS}", remedy="for example: 1,2,4"
        )
    sizes = sorted(int(word) for word in words)
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"--np {text!r}: a number is given twice")
    if len(sizes) < 2:
        raise ConfigError(f"--np {text!r}: one size shows no scaling", remedy="for example: 1,2,4")
    return sizes


def read_changes(text: str | None) -> tuple[str, ...]:
    """Read ``codec=auto lossy=true``: what one of the two plans has besides. Raises `ConfigError`."""
    words = () if text is None else tuple(text.split())
    if text is not None and not (words and all("=" in word for word in words)):
        raise ConfigError(f"--compare {text!r}: expected KEY=VALUE", remedy="for example: --compare codec=int8")
    return words


def make_cases(
    command: Sequence[str], sizes: Sequence[int], mode: str, batch: int | None, changes: tuple[str, ...] = ()
) -> list[ScalingCase]:
    """Return the runs of one round, by mode and size.

    With `changes`, each size of more than one rank runs a second time with these in the plan too.

    In the command, ``{np}`` stands for the ranks and ``{batch}`` for the batch of a rank: `batch` in weak scaling,
    where every rank keeps its work, and `batch` / ranks in strong scaling, where all share it.

    Raises `ConfigError` for a batch without a place or a place without a batch.
    """
    placed = any(BATCH in word for word in command)
    if placed and batch is None:
        raise ConfigError(f"the command has {BATCH}, but no --batch", remedy="for example: --batch 64")
    if batch is not None and not placed:
        raise ConfigError(
            f"--batch {batch}: the command has no {BATCH} where it would go",
            remedy=f"for example: -- python train.py --batch-size {BATCH}",
        )
    if mode != WEAK and not placed:
        raise ConfigError(
            "strong scaling divides the batch among the ranks, and the command does not say where its batch is",
            remedy=f"for example: --mode strong --batch 64 -- python train.py --batch-size {BATCH}",
        )
    modes = (WEAK, STRONG) if mode == "both" else (mode,)
    return [
        ScalingCase(one, ranks, tuple(_filled(word, ranks, _of_rank(one, ranks, batch)) for word in command), also)
        for one in modes
        for ranks in sizes
        for also in ([(), changes] if changes and ranks > 1 else [()])
    ]


def _of_rank(mode: str, ranks: int, batch: int | None) -> int | None:
    if batch is None or mode == WEAK:
        return batch
    if batch % ranks:
        raise ConfigError(f"--batch {batch} cannot be divided among {ranks} ranks", remedy="choose a multiple")
    return batch // ranks


def _filled(word: str, ranks: int, batch: int | None) -> str:
    return word.replace(NP, str(ranks)).replace(BATCH, str(batch))


# What one run of a script tells the scaling benchmark: read from the records of all its ranks.


@dataclass(frozen=True)
class MeasuredRun:
    """One run. Times in seconds; after warm-up but for `training_seconds`. None: not known."""

    ranks: int
    step_seconds: list[float]
    """Each step's time: its slowest rank's."""
    rates: list[float]
    """Samples of all ranks a second, by step; empty when samples are unknown."""
    training_seconds: float
    steps: int
    warm_up_steps: int
    steady: bool
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the step time of all ranks: compute, communication (exposed), waiting, data."""
    load_deviation: float | None = None
    """Standard deviation of the ranks' mean compute over their mean."""
    busy_cores: float | None = None
    """Cores a rank kept busy."""
    accelerator_share: float | None = None
    resident_bytes: int | None = None
    """The most of any rank."""

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def read_measured(run_directory: Path) -> MeasuredRun:
    """Read a finished run. Raises `DataError` when it has no steps that all ranks have recorded."""
    records = read_run(run_directory)
    timelines = [timeline for timeline in records.timelines if timeline.steps]
    size = int(records.facts.get("size") or len(records.timelines))
    if not timelines or len(timelines) < size:
        why = f" ({records.notes[0]})" if records.notes else ""
        raise DataError(
            f"{len(timelines)} of {size} ranks recorded steps{why}",
            remedy="the script must train with fd.distribute, or use fd.record",
        )
    steps = min(len(timeline.steps) for timeline in timelines)
    times = [max(t.steps[i].end_seconds - t.steps[i].begin_seconds for t in timelines) for i in range(steps)]
    settled = settle(times)
    cut = settled.warm_up
    samples = [sum(timeline.steps[i].samples for timeline in timelines) for i in range(steps)]
    parts = [own[cut:steps] for own in step_parts(timelines)]
    every = [part for own in parts for part in own]
    computes = [statistics.fmean(part.busy for part in own) for own in parts]
    return MeasuredRun(
        ranks=len(timelines),
        step_seconds=times[cut:],
        rates=[throughput(n, s) for n, s in zip(samples[cut:], times[cut:], strict=True)] if any(samples) else [],
        training_seconds=max(t.steps[-1].end_seconds - t.steps[0].begin_seconds for t in timelines),
        steps=steps,
        warm_up_steps=cut,
        steady=settled.steady,
        shares=shares_of(every),
        load_deviation=standard_deviation(computes) / statistics.fmean(computes) if any(computes) else None,
        busy_cores=_mean(timelines, "process_cores"),
        accelerator_share=_mean(timelines, "gpu_share"),
        resident_bytes=max(_known(timelines, "resident_bytes"), default=None),
    )


def _known(timelines: list[RankTimeline], attribute: str) -> list[Any]:
    values = [getattr(sample, attribute) for timeline in timelines for sample in timeline.samples]
    return [value for value in values if value is not None]


def _mean(timelines: list[RankTimeline], attribute: str) -> float | None:
    values = _known(timelines, attribute)
    return statistics.fmean(values) if values else None


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


# When has a run settled? Pure functions on step times: how many steps are warm-up, and whether the rest drifts.
#
# [Note: the cut] White's marginal standard error rule ("An effective truncation heuristic for bias reduction in
# simulation output", 1997): leave out the first d values for which the standard error of the mean of the others is
# least. A single late stall would move the cut behind itself, so values are first brought inside the band of the
# second half: its median, and twice the 90th percentile of its absolute deviations on either side. A multiple of
# the median deviation will not do: where most steps take the same time to a tick, that is next to nothing, and so
# narrow a band makes warm-up as tame as any step.
#
# [Note: the drift] What remains is divided into blocks; Mann and Kendall's test on their medians says whether they
# rise or fall.


LEAST_STEPS = 8
"""With fewer nothing can be said about drift, and only the first step is left out."""
BLOCKS = 20
_BAND, _OUTLYING = 2.0, 0.9
_SIGNIFICANT = 2.576
"""A normal variable lies beyond it in one of a hundred cases."""


@dataclass(frozen=True)
class Settled:
    """Where steady running begins."""

    warm_up: int
    """Values to leave out at the begin, at most half."""
    steady: bool
    """Whether the rest neither rises nor falls, as far as it shows."""


def settle(values: Sequence[float]) -> Settled:
    """Return how many of the values are warm-up. See [Note: the cut], [Note: the drift].

    >>> settle([9.0, 5.0, 3.0] + [1.0, 1.1, 0.9, 1.05] * 10)
    Settled(warm_up=3, steady=True)
    """
    if len(values) < LEAST_STEPS:
        return Settled(min(1, max(0, len(values) - 1)), False)
    cut = max(1, _cut(_banded(values)))
    rest = values[cut:]
    return Settled(cut, len(rest) >= LEAST_STEPS and not drifts(rest))


def _banded(values: Sequence[float]) -> list[float]:
    late = values[len(values) // 2 :]
    middle = statistics.median(late)
    deviations = sorted(abs(value - middle) for value in late)
    spread = deviations[int(_OUTLYING * (len(late) - 1))]
    reach = _BAND * max(spread, 0.001 * abs(middle))
    return [min(max(value, middle - reach), middle + reach) for value in values]


def _cut(values: Sequence[float]) -> int:
    """Return the d up to half for which the rest's mean has the least standard error; one pass from behind."""
    best, least = 0, math.inf
    mean, squares = 0.0, 0.0
    for d in range(len(values) - 1, -1, -1):
        count = len(values) - d
        delta = values[d] - mean
        mean += delta / count
        squares += delta * (values[d] - mean)
        if d <= len(values) // 2:
            error = squares / count**2
            if error <= least * (1 + 1e-12):
                best, least = d, min(error, least)
    return best


def drifts(values: Sequence[float]) -> bool:
    """Return whether the values rise or fall, by Mann and Kendall's test on the medians of up to twenty blocks."""
    count = min(BLOCKS, len(values))
    if count < LEAST_STEPS:
        return False
    bounds = [len(values) * i // count for i in range(count + 1)]
    blocks = [statistics.median(values[a:b]) for a, b in pairwise(bounds)]
    rises = sum(
        (later > earlier) - (later < earlier) for i, earlier in enumerate(blocks) for later in blocks[i + 1 :]
    )
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return (abs(rises) - 1) / deviation > _SIGNIFICANT


# The scaling benchmark's result for people: a table, and a page of HTML with the curve.


HEAD = (
    "ranks", "scaling", "training", "step", "95 % interval", "samples/s", "speedup", "95 % interval", "efficiency",
    "communication", "waiting", "data", "load dev.", "cores", "memory",
)  # fmt: skip
_NAMES, _RATES = 2, 9
"""The columns that name a row, and where those of what was lost begin. A terminal has room for half."""


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row's texts, below `HEAD`."""
    low, high = row["step_interval"]
    least, most = row["speedup_interval"]
    busy = row["accelerator_share"]
    return [
        str(row["ranks"]),
        " ".join([row["mode"], *row["changes"]]),
        format_seconds(row["training_seconds"]),
        format_seconds(row["step_seconds"]),
        f"{format_seconds(low)} to {format_seconds(high)}",
        "" if row["samples_per_second"] is None else format_rate(row["samples_per_second"]),
        f"{row['speedup']:.2f}",
        f"{least:.2f} to {most:.2f}",
        f"{row['efficiency']:.2f}",
        f"{row['shares']['communication']:.1%}",
        f"{row['shares']['waiting']:.1%}",
        f"{row['shares']['data']:.1%}",
        "" if row["load_deviation"] is None else f"{row['load_deviation']:.1%}",
        f"{busy:.0%} GPU" if busy is not None else "" if row["busy_cores"] is None else f"{row['busy_cores']:.2f}",
        "" if row["resident_bytes"] is None else format_bytes(row["resident_bytes"]),
    ]


def format_scaling(result: dict[str, Any]) -> str:
    """Return the two halves of the table, and below them what to know."""
    lines = [
        *(f"{format_table(head, rows)}\n" for head, rows in halves(result)),
        *before_and_after(result),
        warm_up(result),
    ]
    return "\n".join([*lines, *failures(result), *(f"note: {note}" for note in result["notes"])])


def warm_up(result: dict[str, Any]) -> str:
    """Return a line on the steps of warm-up, and how often each size ran."""
    steps, rounds = max(row["warm_up_steps"] for row in result["rows"]), result["rounds"]
    return (
        f"warm-up: up to {steps} step{'s' * (steps != 1)} left out by their times;"
        f" {rounds} round{'s' * (rounds != 1)}"
    )


def before_and_after(result: dict[str, Any]) -> list[str]:
    """Return a line for each size that ran with two plans: step time and communication's share with either."""
    rows = {(row["mode"], row["ranks"], bool(row["changes"])): row for row in result["rows"]}
    lines = []
    for (mode, ranks, changed), after in rows.items():
        before = rows.get((mode, ranks, False))
        if changed and before is not None:
            shares = [row["shares"]["communication"] for row in (before, after)]
            lines.append(
                f"{' '.join(after['changes'])} on {ranks} ranks ({mode}): a step "
                f"{format_seconds(before['step_seconds'])} before, {format_seconds(after['step_seconds'])} after "
                f"({before['step_seconds'] / after['step_seconds']:.2f}x); communication {shares[0]:.1%} of it "
                f"before, {shares[1]:.1%} after"
            )
    return lines


def halves(result: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Return what was reached, then what was lost to what and used: each a head and rows of texts."""
    rows = [[*HEAD], *(cells(row) for row in result["rows"])]
    reached = [row[:_RATES] for row in rows]
    lost = [[*row[:_NAMES], *row[_RATES:]] for row in rows]
    return [(half[0], half[1:]) for half in (reached, lost)]


def failures(result: dict[str, Any]) -> list[str]:
    """Return a line for each size that has no numbers."""
    return [
        f"no numbers for {gone['ranks']} rank{'s' * (gone['ranks'] > 1)} ({gone['mode']}): {gone['reason']}"
        for gone in result["failed"]
    ]


WIDTH, HEIGHT, MARGIN = 560, 320, 48
_ASIDE = 6
"""Pixels between the bars of two modes at one size."""


def chart(result: dict[str, Any]) -> dict[str, Any]:
    """Return the curve's places: lines and points by mode, the perfect line, ticks. Pixels from the top left."""
    most = max(row["ranks"] / row["beside_ranks"] for row in result["rows"])
    top = max([most, *(row["speedup_interval"][1] for row in result["rows"])])

    def place(ranks: float, speedup: float) -> tuple[float, float]:
        across = MARGIN + (WIDTH - 2 * MARGIN) * ranks / most
        return round(across, 1), round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * speedup / top, 1)

    series = []
    lines = list(dict.fromkeys((row["mode"], tuple(row["changes"])) for row in result["rows"]))
    for i, (mode, changes) in enumerate(lines):
        own = [row for row in result["rows"] if (row["mode"], tuple(row["changes"])) == (mode, changes)]
        aside = _ASIDE * (i - (len(lines) - 1) / 2)
        name = " ".join([mode, *changes])
        points = [
            {
                "at": _moved(place(row["ranks"] / row["beside_ranks"], row["speedup"]), aside),
                "low": place(0, row["speedup_interval"][0])[1],
                "high": place(0, row["speedup_interval"][1])[1],
                "text": f"{row['ranks']} ranks, {name}: {row['speedup']:.2f}x, efficiency {row['efficiency']:.2f}",
            }
            for row in own
        ]
        series.append({"mode": mode, "name": name, "changed": bool(changes), "points": points})
    ticks = sorted({(row["ranks"], place(row["ranks"] / row["beside_ranks"], 0)[0]) for row in result["rows"]})
    levels = [(level, place(0, level)[1]) for level in range(0, int(top) + 1, max(1, int(top) // 5))]
    return {"series": series, "ideal": (place(0, 0), place(most, most)), "ticks": ticks, "levels": levels}


def _moved(at: tuple[float, float], aside: float) -> tuple[float, float]:
    return round(at[0] + aside, 1), at[1]


def write_html(result: dict[str, Any], path: Path) -> None:
    """Write the page. Raises `ConfigError` when it cannot be written."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("farandole.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("scaling.html.j2").render(
        result=result, tables=halves(result), command=shlex.join(to_words(result)), warm_up=warm_up(result),
        machine=machine_line(result["machine"]), chart=chart(result),
        gains=before_and_after(result), failures=failures(result),
        width=WIDTH, height=HEIGHT, margin=MARGIN, notes=result["notes"],
    )  # fmt: skip
    write_asked(path, page, remedy="choose another")

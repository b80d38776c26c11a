"""Makes the diagnosis of a run from its records: runs every finder and orders the findings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.step_model import MeasuredStep
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import ORDER
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...core.vocabulary.events import OPTIMIZER, OTHER, SETUP_CHECKPOINT_ALARM, SETUP_CRITICAL_BATCH, SETUP_ZERO
from ...core.vocabulary.rules import MOST_ZERO
from ...core.vocabulary.units import format_seconds, format_share
from ..figures.figures import mean
from ..figures.inexact import codec_of, exchanges_none, few_steps
from ..figures.step_parts import COMPUTE_AND_REST, hidden_by_step, rows_by_step
from ..figures.summary import LEAST_UNDIVIDED, NOT_DIVIDED, NOT_SEEN, read_tuning, verdict_of
from ..records.run_reader import RunRecords, how_it_failed, how_it_hung, read_run
from .communication import find_communication
from .finding import KINDS, OUTSIDE, Diagnosis, Finding, Fix, confidence, format_cost, is_taken
from .front_ends import in_words_of
from .host_facts import FIRST, find_crowded, find_device_limits, find_starved, find_threads, with_first
from .inner_exchanges import find_experts, find_inner, find_pipeline, unequal_experts
from .loader_fixes import PREDICTED, SPARSE, CodecCosts, codec_ratio, find_input
from .network import network_of
from .optimizer_step import find_optimizer, find_small_batch
from .pauses import find_irregular, find_own_code, find_pauses
from .step_table import (
    StepTable,
    has_phases,
    is_pipeline,
    make_disjoint,
    make_step_table,
    room_of,
    scaled_to,
)
from .stragglers import find_jitter, find_stragglers

BOUND_SHARE = 0.1
"""Fraction of a step; a smaller cost does not limit a run."""
SAVING = "; about "
"""What follows it in a verdict is the saving, and how to get it."""
_BOUND_OF = {
    **{kind: "communication" for kind in KINDS if kind.endswith("communication")},
    **dict.fromkeys(("small-buckets", "large-buckets", "slow-link", "extra-exchange"), "communication"),
    **dict.fromkeys(("straggler", "jitter", "samples", "oversubscribed", "experts"), "straggler"),
    **dict.fromkeys(("gc", "pause", "irregular"), "pauses"),
    **dict.fromkeys(("crowded", "threads", "optimizer", "small-batch"), "compute"),
    **dict.fromkeys(("bubble", "slow-stage"), "pipeline"),
    "input": "input", "memory": "memory", "launch": "launch", "absent": "unknown", "other": "script",
}  # fmt: skip


def diagnose(run_directory: Path, codec_costs: CodecCosts | None = None) -> Diagnosis:
    """Say where a run's time goes, what each fault costs and what to do about it.

    `codec_costs` are CPU seconds by codec per byte of float32, measured on a host like those of the
    run: with them, predictions count a codec's own time. Whatever can be read is diagnosed; `Diagnosis.notes` say
    what is missing. Raises `DataError` when `run_directory` is none of a run.
    """
    return diagnose_records(read_run(run_directory, for_diagnosis=True), codec_costs)


def diagnose_records(records: RunRecords, codec_costs: CodecCosts | None = None) -> Diagnosis:
    """Return the diagnosis of records that were read already; of a run that hung or failed, that comes first."""
    made = _diagnose(records, codec_costs)
    end = how_it_hung(records.directory) or _how_it_failed(records.directory)
    return replace(made, verdict=f"{end} Until then: {made.verdict}") if end else made


def _how_it_failed(run_directory: Path) -> str:
    line = how_it_failed(run_directory)
    return f"The run failed: {line.rstrip('.')}." if line else ""


def _diagnose(records: RunRecords, codec_costs: CodecCosts | None) -> Diagnosis:
    steps = max((r.step_count for r in records.timelines), default=0)
    table = make_step_table(records) if records.timelines else None
    if table is None or not table.steps or table.step_seconds <= 0:
        why = "no step was recorded" if table is None else "no step is known of all ranks"
        verdict = f"Nothing to diagnose: {why}."
        notes = [*failed_saves(records), *_tuned(records), *records.notes, *(table.notes if table else ())]
        return Diagnosis(records.name, "unknown", verdict, "low", records.size, steps, notes=tuple(notes))
    stragglers, work = find_stragglers(table)
    mended = sum(finding.seconds for finding in stragglers)
    late = [rank for finding in stragglers for rank in finding.ranks]
    crowded = find_crowded(table)
    threads = find_threads(table)
    communication = find_communication(table, codec_costs)
    if is_pipeline(table):  # its ranks have different layers, and wait for each other in every step
        stragglers, communication = [], [each for each in communication if each.kind != "absent"]
    pauses = find_pauses(table)
    waits = find_input(table)
    # Ranks that share cores, or threads that do, starve each other: that has its finding.
    starved = find_starved(table, late) if not crowded and not threads else []
    devices = find_device_limits(table, sum(finding.seconds for finding in starved))
    full = sum(finding.seconds for finding in devices if finding.kind == "memory")
    spikes = [
        scaled_to(finding, max(0.0, 1 - full / finding.seconds)) if finding.kind == "irregular" else finding
        for finding in find_irregular(table, [*pauses, *communication, *waits])
    ]
    paused = {finding.phase for finding in pauses}
    exceptions = sum(f.seconds for f in (*pauses, *spikes) if f.kind not in OUTSIDE)
    # Surest first: what was timed, then what is estimated from it, then what is known from the host's rates alone.
    found = [
        *crowded,
        *find_pipeline(table),
        *communication,
        *find_inner(table),
        *waits,
        *(finding for finding in stragglers if finding.phase not in paused),
        *pauses,
        *spikes,
        *find_experts(table),
        *find_own_code(table),
        *threads,
        *find_optimizer(table),
        *([] if is_pipeline(table) else find_jitter(table, work, mended, exceptions)),
        *starved,
        *devices,
        *find_small_batch(table),
    ]
    disjoint = make_disjoint(found, table.step_seconds, room_of(table), known=has_phases(table.rows))
    findings = in_order(disjoint, several_hosts=len({each.host for each in records.timelines}) > 1)
    findings = [
        in_words_of(replace(each, fixes=tuple(fix for fix in each.fixes if is_taken(records, fix.changes))), table)
        for each in findings
    ]
    parts = parts_of(table)
    inside = [finding for finding in findings if finding.kind not in OUTSIDE]
    bound = bound_of(inside)
    if bound == "compute" and table.undivided_share >= BOUND_SHARE and not (inside and _limits(inside[0])):
        bound = "unknown"  # it may be the data
    unequal = [] if any(finding.kind == "experts" for finding in findings) else unequal_experts(records)
    notes = [*failed_saves(records), *_tuned(records), *unequal, *records.notes, *table.notes, *_notes(table)]
    sentence = _sentence(table, bound, inside, parts)
    start = [each.title for each in findings if each.kind in OUTSIDE and each.share >= BOUND_SHARE]
    if start and not (inside and _limits(inside[0])):
        sentence = f"{sentence.removesuffix('.')}; {start[0]}."
    verdict = with_few(sentence, table, steps)
    return Diagnosis(
        records.name, bound, verdict, confidence(len(table.steps)), records.size,
        steps, len(table.steps), table.step_seconds, parts, _hidden(table), tuple(findings), tuple(notes),
    )  # fmt: skip


def bound_of(findings: Sequence[Finding]) -> str:
    """Return what the first finding binds the run by; computing when it costs little, or when all lack cores."""
    if not findings or not _limits(findings[0]) or _all_lack_cores(findings[0]):
        return "compute"
    return _BOUND_OF[findings[0].kind]


def _all_lack_cores(finding: Finding) -> bool:
    """Whether all ranks have too few cores: then no rank is a straggler."""
    return finding.kind in FIRST or (finding.kind == "oversubscribed" and not finding.phase)


def _limits(finding: Finding) -> bool:
    """Whether a finding is the verdict: by its cost, or because others may follow from it."""
    return finding.share >= BOUND_SHARE or finding.kind in FIRST


def in_order(findings: Sequence[Finding], *, several_hosts: bool) -> list[Finding]:
    """Return the findings, costliest first; but those that limit the steps come before those outside of them.

    A longer run has its slow start only once: it is a fact beside the verdict, which is of the steps.
    """
    ordered = sorted(findings, key=lambda finding: (-finding.seconds, finding.kind == "communication"))
    binds = [finding for finding in ordered if finding.kind not in OUTSIDE and finding.share >= BOUND_SHARE]
    rest = [finding for finding in ordered if finding not in binds]
    return with_first([*binds, *rest], several_hosts=several_hosts)


def parts_of(table: StepTable) -> dict[str, float]:
    """Return the seconds of a mean step by part, over all ranks: phases, communication and waiting."""
    cells = [cell for own in table.cells for cell in own]
    known = has_phases(table.rows)
    parts = {name: mean([cell.phases.get(name, 0.0) for cell in cells]) for name in table.phase_names()}
    if not known and "other" in parts:
        parts["compute"] = parts.pop("other")
    if len(table.cells) > 1 and (table.sees_exchanges or any(cell.inner for cell in cells)):
        parts["communication"] = mean([cell.communication for cell in cells])
        parts["waiting"] = mean([cell.waiting for cell in cells])
    return parts


def _hidden(table: StepTable) -> float:
    if len(table.rows) < 2:
        return 0.0
    by_step = hidden_by_step(rows_by_step(table.rows), one_clock=table.one_clock)
    return mean([by_step[step] for step in table.steps])


def _sentence(table: StepTable, bound: str, findings: Sequence[Finding], parts: Mapping[str, float]) -> str:
    if bound in ("compute", "unknown") and not (findings and _limits(findings[0])):
        share = sum(parts.get(name, 0.0) for name in (*COMPUTE_AND_REST, "compute")) / table.step_seconds
        step = format_seconds(table.step_seconds)
        text = f"Compute-bound: {format_share(share)} of each step of {step} is computing"
        if bound == "unknown":
            text = (
                f"Not known what binds it: {format_share(table.undivided_share)} of each step of {step} is "
                "computing or waiting for data, which are not told apart"
            )
        if not findings:
            return text + "; nothing costs more than 2% of it."
        first = findings[0]
        return f"{text}; the costliest finding costs {format_cost(first.seconds, first.share)}: {first.kind}."
    first = findings[0]
    what = "Not known what binds it" if bound == "unknown" else f"{bound.capitalize()}-bound"
    what += ", and short of cores" if _all_lack_cores(first) else ""
    text = f"{what}: {first.title}".replace("%)", f"% of {format_seconds(table.step_seconds)})")
    best = best_fix(first)
    if best is not None and best.gain is not None:
        text += f"{SAVING}{format_seconds(best.gain.seconds)} of it could be saved"
        text += f": {best.what}" if best.paste else ""
    return text + "."


def with_few(text: str, table: StepTable, steps: int) -> str:
    """Return a sentence that says of how few steps its figures are, if they are few."""
    few = few_steps(len(table.steps), steps)
    return f"{text.removesuffix('.')} ({few})." if few else text


def best_fix(finding: Finding) -> Fix | None:
    """Return the first fix of a finding."""
    return finding.fixes[0] if finding.fixes else None


def _notes(table: StepTable) -> list[str]:
    notes = []
    if len(table.rows) > 1 and not table.sees_exchanges:
        notes.append(NOT_SEEN)
    if table.undivided_share >= LEAST_UNDIVIDED:
        notes.append(NOT_DIVIDED)
    if not has_phases(table.rows):
        notes.append(
            "the records of some rank are of version 1: forward, backward and optimizer are not told apart"
        )
    if (
        table.sees_exchanges
        and not any(e.buckets for own in table.rows for row in own for e in row.exchanges)
        and not exchanges_none(table.records.timelines)
        and len(table.rows) > 1
    ):
        notes.append("no times of buckets: hidden communication and the link are unknown")
    if len(table.steps) < 20:
        notes.append(f"only {len(table.steps)} steps after the warm-up: figures may be off by chance")
    return notes


def _tuned(records: RunRecords) -> list[str]:
    """Say what `farandole tune` changed while the run went on: its steps are not all of one kind."""
    tuning = read_tuning(records.directory)
    return [] if tuning is None else [f"farandole tune: {verdict_of(tuning)}"]


# Checkpoints that were not saved: they cost no time, until the run has to go back to an older one.


def failed_saves(records: RunRecords) -> list[str]:
    """Return a sentence if the last checkpoint of the run was not saved; the ranks say the same."""
    alarms = [str(each.setup.get(SETUP_CHECKPOINT_ALARM) or "") for each in records.timelines]
    return [f"ALARM: {alarm}" for alarm in sorted({each for each in alarms if each})[:1]]


# The verdict on a run in one line, for its closing summary: only where it costs next to nothing.


MOST_BYTES = 2 * 2**20
"""Records that are read in about a second; those of longer runs are left to ``farandole diagnose``."""


def brief_verdict(run_directory: Path) -> str:
    """Return the verdict of `diagnose`; empty where there is none, or the records are too long to read now."""
    try:
        if sum(path.stat().st_size for path in run_directory.glob("events-rank*.jsonl")) > MOST_BYTES:
            return ""
        diagnosis = diagnose(run_directory)
    except (FarandoleError, OSError):
        return ""
    return diagnosis.verdict if diagnosis.steps_looked_at else ""


# A typical step of a run as the step model takes it, to ask what it would be with another batch or codec.


PREDICTED_UNTIMED = [name for name in PREDICTED if name != SPARSE]
"""Finding the largest is slow: nothing is said of it without its measured time."""
_DIVIDING = [name for name in ORDER if name not in ("data", "shard")]


def measured_step(run_directory: Path, costs: CodecCosts | None = None) -> MeasuredStep:
    """Return a typical step of a run of data parallelism.

    `costs`: CPU seconds of codecs for a byte of float32, where they were measured. Raises `DataError` when the
    directory is not a run's, and `ConfigError` when its records do not say what a step exchanges.
    """
    records = read_run(run_directory, for_diagnosis=True)
    table = make_step_table(records) if records.timelines else None
    if table is None or not table.steps:
        raise ConfigError(f"{run_directory}: no step is known of all ranks", remedy="train for 20 steps or more")
    if len(table.cells) < 2:
        raise ConfigError(f"{run_directory} is a run of one rank: nothing is exchanged", remedy="run it on two")
    _refuse_divided(run_directory, table)
    samples = sum(mean([float(cell.samples) for cell in own]) for own in table.cells)
    if samples <= 0:
        raise ConfigError(
            f"{run_directory}: samples are unknown",
            remedy="loader = fd.shard(loader), or fd.log(samples=...)",
        )
    cells = [cell for own in table.cells for cell in own]
    exposed = mean([cell.communication for cell in cells])
    counts = [len(row.exchanges) for own in table.rows for row in own]
    usual = max(1, statistics.mode(counts))
    network = network_of(table, exposed / usual)
    if network is None:
        raise ConfigError(
            f"{run_directory}: the times of buckets were not recorded",
            remedy="train with fd.distribute, and farandole run --run-dir",
        )
    fixed = mean([cell.phases.get(OPTIMIZER, 0.0) + cell.phases.get(OTHER, 0.0) for cell in cells])
    codec = codec_of(table.records)
    ratios = {codec: 1.0}
    notes = [
        "forward and backward are taken to grow in proportion to the samples: a measured run at another batch "
        "is surer"
    ]
    if codec == NONE:
        found = {
            name: codec_ratio(table, name)
            for name in PREDICTED
            if name in (PREDICTED_UNTIMED if costs is None else costs)
        }
        ratios.update({name: ratio for name, ratio in found.items() if ratio is not None})
        if costs is None:
            notes.append("the CPU time of codecs is not counted: --measure-codecs measures it here")
        notes.append("what a lossy codec costs in steps is not counted")
    critical = table.records.timelines[0].setup.get(SETUP_CRITICAL_BATCH)
    return MeasuredStep(
        ranks=records.size,
        global_batch=max(1, round(samples)),
        growing_seconds=max(0.0, table.step_seconds - fixed - exposed),
        fixed_seconds=fixed,
        exposed_seconds=exposed,
        exchanges=usual,
        buckets=tuple(network.buckets),
        link=network.link,
        codec=codec,
        ratios=ratios,
        codec_seconds_per_byte=dict(costs or {}),
        critical_batch=float(critical) if isinstance(critical, (int, float)) and critical > 0 else None,
        notes=(*notes, *table.notes),
    )


def _refuse_divided(run_directory: Path, table: StepTable) -> None:
    """Raise `ConfigError` where a step exchanges more than gradients after backward."""
    plan, setup = table.records.plan, table.records.timelines[0].setup
    divided = [f"{name} = {plan[name]}" for name in _DIVIDING if plan.get(name, 1) != 1]
    if setup.get(SETUP_ZERO) == MOST_ZERO or plan.get("zero") == MOST_ZERO:
        divided.append(f"zero = {MOST_ZERO}")
    if divided:
        raise ConfigError(
            f"{run_directory}: with {', '.join(divided)} a step exchanges more than gradients behind backward, "
            "which is not replayed",
            remedy="ask the planner: farandole plan",
        )

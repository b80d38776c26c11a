"""Time that ordinary steps do not have: collections of garbage, checkpoints, evaluation, spikes, own code.

[Note: pauses add up] A pause of one rank stops all. Pauses of different ranks in the same step overlap, in
different steps they add up; so the cost is the longest of each step, summed over steps and spread over them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from ...core.vocabulary import events
from ...core.vocabulary.codec_spec import AUTO, NONE
from ...core.vocabulary.events import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    GARBAGE_COLLECTION,
    LOSS,
    OPTIMIZER,
    OTHER,
    PIPELINE_WAIT,
    Phase,
)
from ...core.vocabulary.sync_spec import MEASURED_CODEC
from ...core.vocabulary.text import name_ranks
from ...core.vocabulary.units import format_seconds, format_share
from ..figures.figures import low_median, mean
from ..figures.inexact import codec_of
from ..records.rows import StepRow, step_seconds
from ..records.run_reader import RunRecords
from .finding import LEAST_SHARE, SHOWN_RANKS, Finding, Fix, Gain, confidence, format_cost
from .step_table import StepTable, has_phases, is_pipeline

_SPIKE = 1.5
"""Times the median from which a step is a spike."""
_NEARLY_ALL = 0.9
_LEAST_START_STEPS = 50
_START_SHARE = 0.05
_RARER = 4
_COLLECT_ONCE = "import gc; gc.collect(); gc.freeze(); gc.disable()   # once, before the loop"
_UNKNOWN = "look for what happens at these steps; mark it with fd.phase to see it by name"
_KEEP = "keep what the start makes: compiled code, caches, pinned buffers; or train for more steps a start"
_PERSISTENT = "persistent_workers=True  # argument of the DataLoader"
_LESS_EVALUATION = "evaluate on fewer samples, or divided over the ranks: fd.shard(loader, evaluate=True)"
_COPY_SHARE = 0.2
"""The share of a synchronous save for which an asynchronous one stops training (docs/results/checkpoints.md)."""


def find_pauses(table: StepTable) -> list[Finding]:
    """Return a finding for each kind of pause that costs enough."""
    records = table.records
    longest, thinned = _longest_by_step(records)
    steps = max(r.step_count for r in records.timelines)
    skip = {step for r in records.timelines for step in r.counts.numbers[: table.warm_up_steps]}
    found = []
    for name in sorted({*longest, *thinned}):
        by_step = {step: s for step, s in longest.get(name, {}).items() if step not in skip}
        counted = max(1, steps - table.warm_up_steps)
        seconds = (sum(by_step.values()) + thinned.get(name, 0.0)) / counted
        share = seconds / table.step_seconds
        if share < LEAST_SHARE:
            continue
        found.append(_pause(table, name, by_step, seconds, share))
    return found


def _longest_by_step(records: RunRecords) -> tuple[dict[str, dict[int, float]], dict[str, float]]:
    longest: dict[str, dict[int, float]] = {}
    thinned: dict[str, float] = {}
    for rank in records.timelines:
        for name, by_step in rank.counts.pauses.items():
            here = longest.setdefault(name, {})
            for step, seconds in by_step.items():
                here[step] = max(here.get(step, 0.0), seconds)
        for name, seconds in rank.counts.thinned_pauses.items():
            thinned[name] = max(thinned.get(name, 0.0), seconds)
    return longest, thinned


def _pause(table: StepTable, name: str, by_step: Mapping[int, float], seconds: float, share: float) -> Finding:
    records = table.records.timelines
    own = {r.rank: sum(r.counts.pauses.get(name, {}).values()) for r in records}
    ranks = tuple(rank for rank, spent in own.items() if spent > 0.1 * max(own.values()))
    few = ranks if len(ranks) < len(records) else ()
    evidence, period = [], None
    if by_step:
        each = statistics.median(by_step.values())
        evidence.append(f"{len(by_step)} steps with it, {format_seconds(each)} each (median)")
        if (period := period_of(sorted(by_step))) is not None:
            evidence.append(f"every {period} steps")
    if name == GARBAGE_COLLECTION:
        title = f"Python's garbage collection stops ranks: {format_cost(seconds, share)}"
        what = "collect once before the loop, then freeze what lives, and collect by hand every few thousand steps"
        frozen = [r.setup.get(events.SETUP_FROZEN) for r in records]
        if all(frozen):
            what = "make fewer objects, or drop calls of gc.collect(): the collector is frozen or off already"
        gain = Gain(seconds, "the pauses themselves, the longest of each step")
        fixes = [Fix(what, "" if all(frozen) else _COLLECT_ONCE, gain, {events.SETUP_FROZEN: True})]
        return Finding("gc", title, seconds, share, few, (), name, tuple(evidence), tuple(fixes))
    whose = f" on {name_ranks(few, most=SHOWN_RANKS)} alone" if few else ""
    title = f"{name}{whose} stops the steps: {format_cost(seconds, share)}"
    often = f", every {_RARER * period} steps instead of {period}" if period is not None else ""
    part = 1 - 1 / _RARER
    rarer = Gain(part * seconds, f"{_RARER - 1}/{_RARER} of the pauses, the longest of each step")
    fixes = [Fix(f"do {name} {_RARER} times less often{often}", "", rarer)]
    if name == EVALUATION:
        fixes.append(Fix(_LESS_EVALUATION))
    if name == CHECKPOINT:
        fixes = _checkpoint_fixes(table, seconds, period, fixes[0])
    return Finding("pause", title, seconds, share, few, (), name, tuple(evidence), tuple(fixes))


def _checkpoint_fixes(table: StepTable, seconds: float, period: int | None, rarer: Fix) -> list[Fix]:
    """Return the fixes for saves that stop the steps, with what the run itself gave to `fd.save`."""
    setups = [rank.setup for rank in table.records.timelines]
    if any(setup.get(events.SETUP_CHECKPOINT_ASYNCHRONOUS) for setup in setups):
        skip = 'if_busy="skip"  # argument of fd.Checkpointer'
        return [rarer, Fix("skip a save while the one before is not on the disk", skip)]
    given = [str(setup.get(events.SETUP_CHECKPOINT_OBJECTS) or "") for setup in setups]
    usual = '"checkpoints", model, optimizer'  # for torch.save, or a phase that the script named
    objects = next(filter(None, given), usual)
    paste = (
        "# before the loop, after each step, after the loop:\n"
        f"checkpointer = fd.Checkpointer({objects}, every_steps={period or 1000})\n"
        "checkpointer.after_step(step)\n"
        "checkpointer.close()"
    )
    gain = Gain((1 - _COPY_SHARE) * seconds, f"the pauses but {format_share(_COPY_SHARE)}, for the copy")
    what = "save while training goes on: only the copy in memory stops the steps, and another process writes it"
    return [Fix(what, paste, gain, {events.SETUP_CHECKPOINT_ASYNCHRONOUS: True}), rarer]


def find_irregular(table: StepTable, explained: Sequence[Finding]) -> list[Finding]:
    """Find steps that take far longer than the rest, and a slow start, beyond the pauses that are `explained`."""
    lengths = _longest_lengths(table.records)
    numbers = sorted(lengths)
    first, later = numbers[: table.warm_up_steps], numbers[table.warm_up_steps :]
    if len(later) < 10:
        return []
    usual = statistics.median([lengths[step] for step in later])
    if usual <= 0:
        return []
    found = _spikes(table, lengths, later, usual, explained)
    extra = sum(max(0.0, lengths[step] - usual) for step in first) / len(numbers)
    share = extra / table.step_seconds
    if share >= (_START_SHARE if len(numbers) >= _LEAST_START_STEPS else 1):
        times = sum(lengths[s] for s in first) / len(first) / usual
        evidence = (
            f"the first {len(first)} steps take {times:.1f} times the median",
            *_start_goes_to(table, usual),
        )
        fix = Fix(_of_auto(table) or _KEEP)
        cost = format_cost(extra, share) if share < 1 else f"{format_seconds(extra * len(numbers))} in all"
        title = f"the start is slow: {cost}, spread over all steps"
        if share >= 1:
            title = f"the start is slow: {cost}, more than the {len(later)} steps after it"
        found.append(Finding("warm-up", title, extra, share, evidence=evidence, fixes=(fix,), confidence="medium"))
    return found


def _of_auto(table: StepTable) -> str:
    """Return what ends the measuring of codec "auto", whose first exchanges are not coded; empty without it."""
    if table.records.plan.get("codec") != AUTO:
        return ""
    sync, codec = table.records.timelines[0].setup.get(events.SETUP_SYNC), codec_of(table.records)
    chosen = (
        f": sync={sync} codec={MEASURED_CODEC}" if sync else "" if codec in (AUTO, NONE) else f": codec={codec}"
    )
    return f'codec "auto" measures with exchanges that are not coded: name what it chose{chosen}'


def _start_goes_to(table: StepTable, usual: float) -> tuple[str, ...]:
    """Say what the first step spends most of its time on, where it is that which is slow."""
    rows = [records.steps[0] for records in table.records.timelines]
    slowest = max(rows, key=lambda row: row.end_seconds - row.begin_seconds)
    length = slowest.end_seconds - slowest.begin_seconds
    seconds = step_seconds(slowest)
    name = max(seconds, key=lambda phase: seconds[phase])
    if not slowest.phases or length < 3 * usual or seconds[name] < 0.5 * length:
        return ()
    what = (
        "what the script does before and between the phases: imports, data, the model" if name == OTHER else name
    )
    return (f"step {slowest.step} takes {format_seconds(length)}, {format_seconds(seconds[name])} of it {what}",)


def _longest_lengths(records: RunRecords) -> dict[int, float]:
    longest: dict[int, float] = {}
    for rank in records.timelines:
        for step, length in zip(rank.counts.numbers, rank.counts.lengths, strict=True):
            longest[step] = max(longest.get(step, 0.0), length)
    return longest


def _spikes(
    table: StepTable,
    lengths: Mapping[int, float],
    later: Sequence[int],
    usual: float,
    explained: Sequence[Finding],
) -> list[Finding]:
    paused = _explained_by_step(table, {finding.phase for finding in explained})
    meetings = _meetings(table)
    later = [step for step in later if step not in meetings]
    over = {step: lengths[step] - paused.get(step, 0.0) - usual for step in later}
    spikes = {step: extra for step, extra in over.items() if extra > (_SPIKE - 1) * usual}
    if not spikes or len(spikes) > 0.3 * len(later):
        return []  # so many are no exceptions
    seconds = sum(spikes.values()) / len(later)
    share = seconds / table.step_seconds
    if share < LEAST_SHARE:
        return []
    worst = max(spikes, key=lambda step: spikes[step])
    take = "take" if len(spikes) != 1 else "takes"
    evidence = [
        f"{len(spikes)} of {len(later)} steps {take} more than {_SPIKE} times the median, {format_seconds(usual)}"
        f"; the worst is step {worst} with {format_seconds(lengths[worst])}"
    ]
    # Small ones may be the machine's: the rhythm is that of the large.
    period = period_of(sorted(step for step, extra in spikes.items() if extra > 0.5 * spikes[worst]))
    if period is not None:
        evidence.append(f"every {period} steps")
    where = _where(table, spikes)
    ranks: tuple[int, ...] = ()
    phase = ""
    if where is not None:
        ranks, phase = (where[0],), where[1]
        evidence.append(f"the time goes to {phase} of rank {where[0]}")
    rhythm = (
        f"every {period} steps one"
        if period is not None
        else f"{format_share(len(spikes) / len(later))} of the steps"
    )
    takes = "takes" if period is not None else "take"
    title = f"{rhythm} {takes} far longer than the rest: {format_cost(seconds, share)}"
    gain = Gain(seconds, "the spikes' time above the median")
    fix = Fix(_UNKNOWN, 'with fd.phase("name"):', gain)
    beside = _pause_of(table, spikes)
    if beside and phase != DATA:
        evidence.append(f"these are the steps with {beside}, whose own time is not counted in it")
        fix = Fix(f"do less around {beside} in the script, or {beside} less often", "", gain)
    if phase == DATA and _starts_workers_anew(table, ranks[0]):
        evidence.append("the loader's workers start anew at each pass over the data")
        fix = Fix("keep the workers from one pass to the next", _PERSISTENT, gain, {events.SETUP_PERSISTENT: True})
    return [Finding("irregular", title, seconds, share, ranks, (), phase, tuple(evidence), (fix,), "medium")]


def _meetings(table: StepTable) -> set[int]:
    """Return the steps that exchange something where most do not: they are long by what was planned."""
    own = [[step for step, row in zip(table.steps, rows, strict=True) if row.exchanges] for rows in table.rows]
    found = set(itertools.chain.from_iterable(own))
    return found if 2 * len(found) < len(table.steps) else set()


def _pause_of(table: StepTable, spikes: Mapping[int, float]) -> str:
    """Return the pause that nearly all spikes have in their step, or just before it; empty if there is none."""
    longest, _ = _longest_by_step(table.records)
    with_pause = {
        name: sum(step in by_step or step - 1 in by_step for step in spikes)
        for name, by_step in longest.items()
        if name != GARBAGE_COLLECTION and len(by_step) < 2 * len(spikes)
    }
    best = max(with_pause, key=lambda name: with_pause[name], default="")
    return best if best and with_pause[best] >= _NEARLY_ALL * len(spikes) else ""


def _starts_workers_anew(table: StepTable, rank: int) -> bool:
    setup = table.records.timelines[table.ranks.index(rank)].setup
    return bool(setup.get(events.SETUP_WORKERS)) and setup.get(events.SETUP_PERSISTENT) is False


def _explained_by_step(table: StepTable, phases: set[str]) -> dict[int, float]:
    """Return what findings of these phases count of each step, beyond what they count of an ordinary one."""
    found: dict[int, float] = {}
    for name, by_step in _longest_by_step(table.records)[0].items():
        for step, seconds in by_step.items():
            if name in phases:
                found[step] = found.get(step, 0.0) + seconds
    counted = []
    if EXCHANGE in phases:
        counted.append([max(cell.communication for cell in cells) for cells in table.by_step()])
    if DATA in phases:
        counted.append([low_median([cell.phases.get(DATA, 0.0) for cell in cells]) for cells in table.by_step()])
    for by_cell in counted:
        usual = statistics.median(by_cell)
        for step, own in zip(table.steps, by_cell, strict=True):
            found[step] = found.get(step, 0.0) + max(0.0, own - usual)
    return found


def _where(table: StepTable, spikes: Mapping[int, float]) -> tuple[int, str] | None:
    """Return the rank and phase that the spikes' time goes to, if most of it goes to one."""
    totals: dict[tuple[int, str], float] = {}
    counted = 0.0
    for rank, own in zip(table.ranks, table.cells, strict=True):
        for name in table.phase_names():
            usual = statistics.median([cell.phases.get(name, 0.0) for cell in own])
            for step, cell in zip(table.steps, own, strict=True):
                if step in spikes:
                    extra = max(0.0, cell.phases.get(name, 0.0) - usual)
                    totals[rank, name] = totals.get((rank, name), 0.0) + extra
    counted = sum(extra for step, extra in spikes.items() if step in set(table.steps))
    if not totals or counted <= 0:
        return None
    best = max(totals, key=lambda key: totals[key])
    return best if totals[best] > 0.5 * counted else None


def period_of(steps: Sequence[int]) -> int | None:
    """Return the distance of steps that come regularly; None when they do not, or are fewer than three."""
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    if len(gaps) < 2:
        return None
    period = statistics.mode(gaps)
    return period if period > 1 and sum(gap % period == 0 for gap in gaps) >= 0.8 * len(gaps) else None


# The script's own code between the phases: how much of a step it takes, and where in the loop it stands.


_LEAST_SHARE = 0.05
"""Fraction of a step: every loop has some code of its own."""
_SHOWN = 3
_BEGIN = "begin"
_NAMES: Mapping[str, str] = {
    _BEGIN: "the previous optimizer.step()", DATA: "the batch", FORWARD: "forward", LOSS: "the loss",
    BACKWARD: "backward", EXCHANGE: "backward", OPTIMIZER: "optimizer.step()",
    PIPELINE_WAIT: "the pipeline's wait",
}  # fmt: skip
_IN_STEP = frozenset((FORWARD, LOSS, BACKWARD, EXCHANGE, PIPELINE_WAIT))

Place = tuple[str, str]
"""The phases before and after it, as a user knows them."""


def find_own_code(table: StepTable) -> list[Finding]:
    """Find time in no phase that ordinary steps of at least half of the ranks have."""
    timelines = table.records.timelines
    if not has_phases(table.rows) or any(timeline.device_phases for timeline in timelines):
        return []  # nothing tells the phases; or the host waits for an accelerator there, whose phases it hides
    by_step = [low_median([cell.phases.get(OTHER, 0.0) for cell in cells]) for cells in table.by_step()]
    places = usual_places(table)
    if len(table.rows) > 1 and not table.sees_exchanges:
        # Whatever exchanges the gradients may be waited for there.
        places = {place: spent for place, spent in places.items() if place[0] != BACKWARD}
    if is_pipeline(table):  # between what `fd.step` does of a schedule no code of the script runs
        places = {place: spent for place, spent in places.items() if not _IN_STEP.issuperset(place)}
    seconds = min(statistics.median(by_step), mean(by_step), sum(places.values()))
    share = seconds / table.step_seconds
    if share < _LEAST_SHARE:
        return []
    most = sorted(places, key=lambda place: -places[place])[:_SHOWN]
    where = _words(most[0]) if most and places[most[0]] > 0.5 * sum(places.values()) else "between the phases"
    evidence = [
        ", ".join(f"{format_seconds(places[place])} {_words(place)}" for place in most)
        + " (median of a step, mean of the ranks)"
    ]
    if not any(row.data_seconds for own in table.rows for row in own):
        evidence.append("the loader is not timed: waiting for batches is in it (give it to fd.shard or fd.record)")
    fix = Fix(
        "mark it with fd.phase to see it by name; then do it less often, move it out of the loop or to a thread",
        'with fd.phase("name"):', Gain(seconds, "all of it, if the loop no longer does it"),
    )  # fmt: skip
    title = f"your own code {where} takes {format_cost(seconds, share)}"
    return [
        Finding("other", title, seconds, share, phase=OTHER, evidence=tuple(evidence), fixes=(fix,),
                confidence=confidence(len(table.steps)))
    ]  # fmt: skip


def usual_places(table: StepTable) -> dict[Place, float]:
    """Return the seconds of a usual step in no phase, by place: the median over steps, the mean over ranks."""
    totals: dict[Place, float] = {}
    for own in table.rows:
        by_step = [gaps_of(row) for row in own]
        for place in {place for gaps in by_step for place in gaps}:
            usual = statistics.median([gaps.get(place, 0.0) for gaps in by_step])
            totals[place] = totals.get(place, 0.0) + usual / len(table.rows)
    return {place: seconds for place, seconds in totals.items() if seconds > 0}


def gaps_of(row: StepRow) -> dict[Place, float]:
    """Return the seconds of a step in no phase, by the phases before and after."""
    phases = [*row.phases, *(Phase(EXCHANGE, e.wait_begin_seconds, e.wait_end_seconds) for e in row.exchanges)]
    gaps: dict[Place, float] = {}
    at, before = row.begin_seconds, _BEGIN
    for phase in sorted(phases, key=lambda phase: (phase.begin_seconds, -phase.end_seconds)):
        if phase.begin_seconds > at:
            place = (before, phase.name)
            gaps[place] = gaps.get(place, 0.0) + phase.begin_seconds - at
        if phase.end_seconds > at:
            at, before = phase.end_seconds, phase.name
    if row.end_seconds > at:
        gaps[before, OPTIMIZER] = gaps.get((before, OPTIMIZER), 0.0) + row.end_seconds - at
    inner = row.inner_phases.get(OTHER, 0.0)  # of rows of tables: no row says in which gap
    for place in sorted(gaps, key=lambda place: -gaps[place]):
        taken = min(inner, gaps[place])
        gaps[place] -= taken
        inner -= taken
    return gaps


def _words(place: Place) -> str:
    first, second = (_NAMES.get(name, f"phase {name!r}") for name in place)
    return f"between {first} and {second}"

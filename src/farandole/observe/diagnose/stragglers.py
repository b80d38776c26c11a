"""Stragglers: a rank or a host that is late in every step, and ranks that are late in different steps.

[Note: the cost of a straggler] A step lasts as long as the most work that any rank has. The cost of a slow
rank is by how much that maximum falls, step by step, when its usual excess over the others is taken away. What
it is slow at is where the excess is. Then the next slowest is looked for in the remaining work. Where a thread
holds Python's lock, for 5 ms now and then, all of the excess counts, and what the others wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.step_model import divide_samples, longest_seconds
from ...core.vocabulary.degrees import SPEED, is_unequal
from ...core.vocabulary.events import (
    BACKWARD,
    COMPUTING,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    SETUP_DEVICE,
    SETUP_PIPELINE,
    SETUP_REPLICAS,
    SETUP_SHARES,
    SETUP_ZERO,
    UNDIVIDED,
    SetupValue,
)
from ...core.vocabulary.rules import MOST_ZERO, allows
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks
from ...core.vocabulary.units import format_seconds, format_share
from ..figures.figures import mean, standard_deviation
from .finding import (
    LEAST_SHARE,
    SHOWN_RANKS,
    Finding,
    Fix,
    Gain,
    command_with,
    confidence,
    format_cost,
    stands_out,
)
from .host_facts import CpuStarvation, busy_thread_of, cpu_starvation_of
from .loader_fixes import capped, loader_facts, loader_fixes
from .step_table import StepTable, has_phases

_MOST_STRAGGLERS = 3
_LEAST_JITTER_SHARE = 0.08
_ALIKE = 0.6
"""Correlation from which ranks' work is said to follow their samples."""

_OF_SAMPLES = (FORWARD, LOSS, BACKWARD, COMPUTING)
"""Phases that take longer with more samples."""
_FIXES: Mapping[str, tuple[str, str]] = {
    DATA: ("give this rank's data a place as fast as the others'", ""),
    FORWARD: ("look for what only this rank does in forward, e.g. logging or another device", ""),
    BACKWARD: ("look for what only this rank does in backward, e.g. hooks, clocks or temperature", ""),
    OPTIMIZER: ("let this rank do less around optimizer.step(): logging and saving belong on a thread", ""),
    UNDIVIDED: ("look for what is slower on this rank alone: its data, or its computing", ""),
    OTHER: ("look for what this rank does between the phases, e.g. metrics, printing or .item() calls", ""),
}


@dataclass(frozen=True)
class Excess:
    """How much more work some ranks have than the others."""

    members: tuple[int, ...]
    """Rows of the table."""
    by_member: Mapping[int, float]
    """Median excess by row."""
    by_phase: Mapping[str, float]


def find_stragglers(table: StepTable) -> tuple[list[Finding], list[list[float]]]:
    """Return the findings, and the work by step and rank once all of them are fixed."""
    work = [[cell.work for cell in cells] for cells in table.by_step()]
    found: list[Finding] = []
    left = set(range(len(table.cells)))
    while len(found) < _MOST_STRAGGLERS and len(left) > 1:
        excess = _slowest(table, work, left)
        if excess is None:
            break
        mended = [[own - max(0.0, excess.by_member.get(i, 0.0)) for i, own in enumerate(step)] for step in work]
        thread = busy_thread_of(table, excess.members)
        if thread is not None:
            mended = [_without(excess.members, step) for step in work]
        saved = mean([max(before) - max(after) for before, after in zip(work, mended, strict=True)])
        if thread is not None:
            saved = max(saved, _waited_for(table, excess.members))
        share = saved / table.step_seconds
        if share < LEAST_SHARE:
            break
        found.append(_finding(table, excess, saved, share, thread))
        work = mended
        left -= set(excess.members)
    return found, work


def _without(members: Sequence[int], step: Sequence[float]) -> list[float]:
    """Return a step's work with no more of the `members` than is usual among the rest."""
    usual = statistics.median([own for i, own in enumerate(step) if i not in members])
    return [min(own, usual) if i in members else own for i, own in enumerate(step)]


def _waited_for(table: StepTable, members: Sequence[int]) -> float:
    """Return the mean wait of the others: a lock delays the thread that exchanges, too, which is no work."""
    return mean([max(c.waiting for i, c in enumerate(cells) if i not in members) for cells in table.by_step()])


def _slowest(table: StepTable, work: Sequence[Sequence[float]], left: set[int]) -> Excess | None:
    """Return the rank, or the host, that has the most work beside the rest, if more than by chance."""
    medians = {i: statistics.median([step[i] for step in work]) for i in left}
    slowest = max(left, key=lambda i: medians[i])
    for members in (_whole_host(table, slowest, medians), (slowest,)):
        others = [i for i in range(len(table.cells)) if i not in members]
        if not members or not others:
            continue
        beside = {i: [step[i] - statistics.median([step[o] for o in others]) for step in work] for i in members}
        if all(stands_out(differences) for differences in beside.values()):
            phases = _by_phase(table, members, others)
            return Excess(members, {i: statistics.median(d) for i, d in beside.items()}, phases)
    return None


def _whole_host(table: StepTable, slowest: int, medians: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks of the slowest one's host if all of them are slower than every other rank."""
    host = table.records.timelines[slowest].host
    members = tuple(i for i, records in enumerate(table.records.timelines) if records.host == host)
    others = [medians[i] for i in medians if i not in members]
    mine = [medians[i] for i in members if i in medians]
    if len(members) < 2 or len(mine) < len(members) or not others:
        return ()
    excess = max(mine) - statistics.median(others)
    return members if min(mine) - max(others) > 0.5 * excess else ()


def _by_phase(table: StepTable, members: Sequence[int], others: Sequence[int]) -> dict[str, float]:
    """Return the median excess by phase, of the member that has most."""
    found = {}
    for name in table.phase_names():
        differences = []
        for cells in table.by_step():
            usual = statistics.median([cells[o].phases.get(name, 0.0) for o in others])
            differences.append(max(cells[m].phases.get(name, 0.0) for m in members) - usual)
        found[name] = statistics.median(differences)
    return found


def _finding(
    table: StepTable, excess: Excess, saved: float, share: float, thread: CpuStarvation | None
) -> Finding:
    ranks = tuple(table.ranks[i] for i in excess.members)
    records = [table.records.timelines[i] for i in excess.members]
    hosts = tuple(dict.fromkeys(record.host for record in records))
    phase = max(excess.by_phase, key=lambda name: excess.by_phase[name])
    late = _lateness(table, excess.members)
    known = has_phases(table.rows)
    evidence = [_phase_line(excess.by_phase)]
    if late is not None:
        seconds, steps = late
        evidence.append(
            f"its last bucket leaves {format_seconds(seconds)} after the others' (median of {steps} steps)"
        )
    else:
        evidence.append("seen in its own work; arrivals cannot be compared, as the clocks cannot")
    shown_hosts = hosts if len({r.host for r in table.records.timelines}) > 1 else ()
    who = name_ranks(ranks, most=SHOWN_RANKS, hosts=shown_hosts)
    verb = "is" if len(ranks) == 1 else "are"
    kind, what, paste = "straggler", *_FIXES.get(phase, (f"look for what only this rank does in {phase}", ""))
    where = f"in {phase}" if phase != OTHER else ("outside of the phases" if known else "in computing")
    if phase == UNDIVIDED:
        where = "before the exchange, waiting for data or computing"
    title = f"{who} {verb} late {where}: all wait for it, {format_cost(saved, share)}"
    samples = _more_samples(table, excess)
    causes = [cpu_starvation_of(table, i) for i in excess.members] if phase != DATA else []
    # A cause must explain half of the excess at least, by what is lost beyond what the others lose too.
    others = [cpu_starvation_of(table, i) for i in range(len(table.cells)) if i not in excess.members]
    usual = statistics.median([0.0 if other is None else other.lost_seconds for other in others])
    enough = usual + 0.5 * max(excess.by_member.values())
    cause = thread or next((c for c in causes if c is not None and c.lost_seconds >= enough), None)
    if samples is not None:
        kind = "samples"
        title = (
            f"{who} {verb} given {format_share(samples)} more samples than the others: {format_cost(saved, share)}"
        )
        what, paste = "divide the samples evenly", "loader = fd.shard(loader)"
        evidence.append("the extra work is in proportion to the extra samples")
    elif cause is not None:
        kind, what, paste, evidence = cause.kind, cause.fix, cause.paste, [*evidence, cause.evidence]
        title = f"{who} {verb} late {where}, {cause.because}: {format_cost(saved, share)}"
    more: list[Fix] = []
    if kind == "straggler" and phase == DATA and thread is None:
        wait = max(
            statistics.median([cell.phases.get(DATA, 0.0) for cell in table.cells[i]]) for i in excess.members
        )
        reasons, proposed = loader_fixes(loader_facts(table, excess.members, wait))
        evidence += reasons
        more = [capped(fix, saved) for fix in proposed if fix.gain is not None]
    shares = _shares_fix(table) if phase in _OF_SAMPLES and kind == "straggler" and thread is None else []
    gain = Gain(saved, f"the step then ends with the next slowest rank, {format_seconds(saved)} earlier")
    return Finding(
        kind, title, saved, share, ranks, hosts, phase, tuple(evidence), (*more, Fix(what, paste, gain), *shares),
        confidence(len(table.steps)),
    )  # fmt: skip


def _shares_fix(table: StepTable) -> list[Fix]:
    """Return what shares by speed would gain, where the run could have had them and has not."""
    timelines, plan = table.records.timelines, table.records.plan
    setups = [each.setup for each in timelines]
    is_ours = all(each.layouts for each in timelines) and not table.front_end
    if not is_ours or len(timelines) < 2 or any(_rules_out_shares(each) for each in setups):
        return []
    if is_unequal(str(plan.get("balance", ""))) or not allows("balance", SPEED, {**Plan().to_mapping(), **plan}):
        return []
    counts = [mean([cell.samples for cell in own]) for own in table.cells]
    seconds = [
        mean([sum(cell.phases.get(name, 0.0) for name in _OF_SAMPLES) for cell in own]) for own in table.cells
    ]
    if min(counts) <= 0 or min(seconds) <= 0:
        return []
    speeds = tuple(count / own for count, own in zip(counts, seconds, strict=True))
    best = divide_samples(round(sum(counts)), speeds)
    saved = max(seconds) - longest_seconds(best, speeds)
    if saved < LEAST_SHARE * table.step_seconds:
        return []
    shown = " ".join(map(str, best if len(best) <= SHOWN_RANKS else [*best[:SHOWN_RANKS], "..."]))
    basis = f"samples by rank {shown}: the longest computing is then {format_seconds(max(seconds) - saved)}"
    changes = {"balance": SPEED}
    what = "if that is how fast it is: give each rank samples by its speed, with the same batch of all ranks"
    return [Fix(what, command_with(table.records, changes), Gain(saved, basis), changes)]


def _rules_out_shares(setup: Mapping[str, SetupValue]) -> bool:
    """Return whether a rank has unequal shares already, or a part of the model, or an accelerator."""
    has_part = (
        any(setup.get(name) for name in (SETUP_REPLICAS, SETUP_PIPELINE)) or setup.get(SETUP_ZERO) == MOST_ZERO
    )
    return bool(has_part or setup.get(SETUP_SHARES) or setup.get(SETUP_DEVICE, "cpu") != "cpu")


def _phase_line(by_phase: Mapping[str, float]) -> str:
    largest = sorted(by_phase, key=lambda name: -by_phase[name])[:3]
    top = by_phase[largest[0]]
    shown = [f"{name} +{format_seconds(by_phase[name])}" for name in largest if by_phase[name] > 0.1 * top]
    return f"more work a step than the other ranks: {', '.join(shown)}"


def _lateness(table: StepTable, members: Sequence[int]) -> tuple[float, int] | None:
    """Return by how much the last of the members is late where all exchange, and in how many steps they do."""
    late = [
        max(cell.lateness for cell in cells if cell.lateness is not None)
        for cells in zip(*(table.cells[i] for i in members), strict=True)
        if all(cell.lateness is not None for cell in cells)
    ]
    return (statistics.median(late), len(late)) if late else None


def _more_samples(table: StepTable, excess: Excess) -> float | None:
    """Return how many more samples the members have, as a share, if that explains their work."""
    if any(records.setup.get(SETUP_SHARES) for records in table.records.timelines):
        return None  # the plan gives it more
    counts = [mean([cell.samples for cell in own]) for own in table.cells]
    others = [counts[i] for i in range(len(counts)) if i not in excess.members]
    mine = mean([counts[i] for i in excess.members])
    usual = statistics.median(others)
    if usual <= 0 or mine < 1.02 * usual:
        return None
    extra = mine / usual - 1
    work = [statistics.median([cell.work for cell in own]) for own in table.cells]
    usual_work = statistics.median([work[i] for i in range(len(work)) if i not in excess.members])
    explained = extra * usual_work / max(excess.by_member.values())
    return extra if 0.4 < explained < 2.5 else None


def find_jitter(
    table: StepTable, work: Sequence[Sequence[float]], mended: float, explained: float = 0.0
) -> list[Finding]:
    """Find ranks that are late in different steps, in the work that remains without stragglers.

    Rare pauses and spikes make ranks late too: their cost is `explained` already.
    """
    if len(table.cells) < 2 or not work:
        return []
    seconds = mean([max(step) - mean(step) for step in work]) - explained * (1 - 1 / len(table.cells))
    waited = mean([cell.waiting for own in table.cells for cell in own]) - mended * (1 - 1 / len(table.cells))
    seconds = min(seconds, max(0.0, waited)) if waited > 0 else 0.0
    share = seconds / table.step_seconds
    if share < _LEAST_JITTER_SHARE or len(work) < 5:
        return []
    follows = _follows(table, work)
    spread = mean([standard_deviation(step) for step in work])
    evidence = [f"standard deviation of the ranks' work within a step: {format_seconds(spread)}"]
    gain = Gain(seconds, "largest work of a step less the mean of the ranks, averaged over steps")
    if follows:
        evidence.append(f"it follows the number of {follows} (correlation above {_ALIKE})")
        fix = Fix(f"give every rank about as many {follows} in a step, e.g. batches of like lengths", "", gain)
        title = f"ranks have unequal {follows} and are late in different steps: {format_cost(seconds, share)}"
        return [Finding("samples", title, seconds, share, evidence=tuple(evidence), fixes=(fix,))]
    fix = _steady_fix(table, gain)
    title = f"ranks are late in different steps: {format_cost(seconds, share)}"
    return [Finding("jitter", title, seconds, share, evidence=tuple(evidence), fixes=(fix,), confidence="medium")]


def _steady_fix(table: StepTable, gain: Gain) -> Fix:
    """Return what to do about ranks of which another one is late each time; to bind them, if they are not."""
    typed = table.records.facts.get("typed_command")
    command = table.records.facts.get("command")
    options = (
        typed[: len(typed) - len(command) + 1] if isinstance(typed, list) and isinstance(command, list) else []
    )
    look = "look for work of changing size: inputs of different length, other programs"
    if "--no-bind" in options:
        line = command_with(table.records, without=("--no-bind",))
        return Fix(f"bind ranks to cores of their own (drop --no-bind), and {look}", line, gain)
    if table.records.facts.get("typed_command") is None and not table.records.facts.get("command"):
        return Fix(f"bind ranks to cores of their own, as farandole run does, and {look}",
                   command_with(table.records), gain)  # fmt: skip
    return Fix(look, "", gain)


def _follows(table: StepTable, work: Sequence[Sequence[float]]) -> str:
    """Return what the ranks' work follows: "tokens", "samples" or nothing."""
    columns = table.by_step()
    for name in ("tokens", "samples"):
        xs, ys = [], []
        for cells, step in zip(columns, work, strict=True):
            counts = [float(getattr(cell, name)) for cell in cells]
            xs += [count - mean(counts) for count in counts]
            ys += [own - mean(step) for own in step]
        if _correlation(xs, ys) > _ALIKE:
            return name
    return ""


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    xx, yy = sum(x * x for x in xs), sum(y * y for y in ys)
    return sum(x * y for x, y in zip(xs, ys, strict=True)) / (xx * yy) ** 0.5 if xx > 0 and yy > 0 else 0.0

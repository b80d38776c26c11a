"""What the hosts say: a core that is shared, memory that runs short, an accelerator that waits for its host.

[Note: lost CPU time] While a rank computes on the host it should have at least one core. Computing time
minus its CPU time is time in which it did not run. Other facts give the reason:
preemptions on a busy machine mean another program, page faults and swapping mean memory. A rank that only waits
(for a device, or asleep) loses nothing, because no other process used its core. If the kernel reports
for how long the main thread was runnable and waited for a core, this is the lost time; the part of it in
which it computed is the cost, since the part in the exchange is in the cost of communication already.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.vocabulary import events
from ...core.vocabulary.events import SETUP_THREAD, Sample
from ...core.vocabulary.text import name_ranks
from ...core.vocabulary.units import format_bytes, format_seconds, format_share
from ..figures.figures import mean
from ..figures.step_parts import COMPUTE_AND_REST
from .finding import LEAST_SHARE, SHOWN_RANKS, Finding, Fix, Gain, command_with, format_cost
from .step_table import COMMUNICATION, StepTable, computing_of, cores_together, rows_by_machine, sources_of

_BUSY_MACHINE = 0.9
_LOST_SHARE = 0.15
_PREEMPTIONS_PER_SECOND = 20.0
_SWAP_BYTES_PER_SECOND = 1e6
_FAULTS_PER_SECOND = 20.0
_DEVICE_FULL = 0.97
_BUSY_THREAD = 0.3
"""CPU seconds a second."""
_DEVICE_IDLE = 0.6


@dataclass(frozen=True)
class CpuStarvation:
    """What keeps a rank from computing."""

    kind: str
    because: str
    evidence: str
    fix: str
    paste: str
    lost_seconds: float
    """Lost seconds per step."""


@dataclass(frozen=True)
class CpuFacts:
    """Samples of one rank, averaged by the time they cover. None: unknown."""

    process_cores: float | None
    core_wait_share: float | None
    machine_share: float | None
    preemptions_per_second: float | None
    swapped_per_second: float | None
    faults_per_second: float | None
    gpu_share: float | None
    gpu_full_share: float | None
    thread_cores: float | None
    children_cores: float | None


def facts_of(samples: Sequence[Sample]) -> CpuFacts:
    """Return the averages; the first sample, which covers the start, is left out when there are more."""
    used = samples[1:] if len(samples) > 2 else samples
    full = [s.gpu_used_bytes / s.gpu_total_bytes for s in used if s.gpu_used_bytes and s.gpu_total_bytes]
    return CpuFacts(
        _rate(used, "process_cores", is_rate=True),
        _rate(used, "core_wait_share", is_rate=True),
        _rate(used, "machine_share", is_rate=True),
        _rate(used, "preemptions"),
        _rate(used, "swapped_bytes"),
        _rate(used, "major_faults"),
        _rate(used, "gpu_share", is_rate=True),
        max(full) if full else None,
        _rate(used, "thread_cores", is_rate=True),
        _rate(used, "children_cores", is_rate=True),
    )


def busy_thread_of(table: StepTable, members: Sequence[int]) -> CpuStarvation | None:
    """Return the Python thread that keeps some ranks from computing, if each has one and the others have none.

    While it computes it holds the interpreter's lock (GIL), for 5 ms at a time.
    """
    shares = [facts_of(records.samples).thread_cores or 0.0 for records in table.records.timelines]
    least = min(shares[i] for i in members)
    others = [share for i, share in enumerate(shares) if i not in members]
    if least < _BUSY_THREAD or least < 2 * max(others, default=0.0):
        return None
    place = str(table.records.timelines[members[0]].setup.get(SETUP_THREAD) or "another Python thread")
    return CpuStarvation(
        "straggler", f"while a thread ({place}) holds Python's lock",
        f"another Python thread of it computes {format_share(least)} of the time; the training waits for the lock "
        "(GIL) meanwhile",
        "run it in a process of its own (multiprocessing), let it sleep between its rounds, or stop it", "", 0.0,
    )  # fmt: skip


def _rate(samples: Sequence[Sample], name: str, *, is_rate: bool = False) -> float | None:
    known = [(getattr(s, name), s.span_seconds) for s in samples if getattr(s, name) is not None]
    seconds = sum(span for _, span in known)
    if seconds <= 0:
        return None
    return float(sum(value * (span if is_rate else 1.0) for value, span in known) / seconds)


def cpu_starvation_of(table: StepTable, row: int) -> CpuStarvation | None:
    """Return what takes the CPU from a rank, or None. See [Note: lost CPU time]."""
    facts = facts_of(table.records.timelines[row].samples)
    own = table.cells[row]
    length = mean([cell.length for cell in own])
    computing = computing_of(table, row)
    if facts.process_cores is None or computing <= 0 or length <= 0:
        return None
    lost = computing - facts.process_cores * length
    queued = None if facts.core_wait_share is None else facts.core_wait_share * length
    if max(lost, queued or 0.0) < _LOST_SHARE * computing:
        return None
    rank = f"rank {table.ranks[row]}"
    cores, part = f"{facts.process_cores:.2f}", format_share(computing / length)
    had = f"{rank} had {cores} of a core while {part} of its time was computing"
    swapped, faults = facts.swapped_per_second or 0.0, facts.faults_per_second or 0.0
    if lost >= _LOST_SHARE * computing and (swapped > _SWAP_BYTES_PER_SECOND or faults > _FAULTS_PER_SECOND):
        detail = f"{format_bytes(swapped)} a second swapped, {faults:.0f} major page faults a second"
        return CpuStarvation(
            "memory", "waiting for memory that was swapped out", f"{had}; {detail}",
            "use less memory on this host: a smaller batch, fewer loader workers, or other programs elsewhere",
            "free -h; ps aux --sort=-rss | head", lost,
        )  # fmt: skip
    preempted = facts.preemptions_per_second or 0.0
    if queued is not None:
        others = queued >= _LOST_SHARE * computing
        had = f"{rank} was ready and waited for a core {format_share(queued / length)} of the time"
        lost = _lost_in_computing(computing, queued, facts.process_cores * length)
        if queued - lost > LEAST_SHARE * length and len(table.ranks) > 1:
            had += f" ({format_seconds(lost)} a step while it computed, the rest in the exchange's cost)"
    else:
        others = (facts.machine_share or 0.0) >= _BUSY_MACHINE or preempted >= _PREEMPTIONS_PER_SECOND
    if others:
        busy = "" if facts.machine_share is None else f"; the machine was {format_share(facts.machine_share)} busy"
        return CpuStarvation(
            "oversubscribed", "sharing a core with something else",
            f"{had}{busy}; {preempted:.0f} preemptions a second",
            "give the rank a core of its own: end the other program, or start fewer ranks or threads",
            "top -o %CPU   # what else runs", lost,
        )  # fmt: skip
    return None


def _lost_in_computing(computing: float, queued: float, used: float) -> float:
    """Return how much of the time in which a rank was ready and had no core was in its computing, not elsewhere.

    It is ready while it runs and while it is queued. Who shares the core does not ask what it is needed for: the
    share of this time in the queue is taken to be the same in computing and in the exchange.
    """
    starved = queued / (queued + used) if queued + used > 0 else 0.0
    return min(queued, max(computing * starved, computing - used))


def find_starved(table: StepTable, taken: Sequence[int]) -> list[Finding]:
    """Find what takes the CPU from all ranks alike; `taken` ranks have a finding already."""
    found = []
    by_kind: dict[str, dict[int, CpuStarvation]] = {}
    for row, rank in enumerate(table.ranks):
        starvation = None if rank in taken else cpu_starvation_of(table, row)
        if starvation is not None:
            by_kind.setdefault(starvation.kind, {})[row] = starvation
    for kind, starved in by_kind.items():
        first = next(iter(starved.values()))
        seconds = statistics.median([h.lost_seconds for h in starved.values()])
        if len(starved) < len(table.ranks) - len(taken):
            continue  # a few of many, and not late: no rank waits for them
        share = seconds / table.step_seconds
        if share < LEAST_SHARE:
            continue
        ranks = tuple(table.ranks[row] for row in starved)
        hosts = tuple(dict.fromkeys(table.records.timelines[row].host for row in starved))
        verb = "is" if len(ranks) == 1 else "are"
        title = f"{name_ranks(ranks, most=SHOWN_RANKS)} {verb} {first.because}: {format_cost(seconds, share)}"
        gain = Gain(seconds, "computing takes that much longer than the CPU time it uses")
        fix = Fix(first.fix, first.paste, gain)
        found.append(Finding(kind, title, seconds, share, ranks, hosts, "", (first.evidence,), (fix,), "medium"))
    return found


def find_device_limits(table: StepTable, starved_seconds: float) -> list[Finding]:
    """Find accelerators that wait for their host's launches, or whose memory is at its limit.

    `starved_seconds` of a step the hosts had no core: then accelerators wait too, and it is not for launches.
    """
    found = []
    facts = [facts_of(records.samples) for records in table.records.timelines]
    shares = [each.gpu_share for each in facts if each.gpu_share is not None]
    if shares and len(shares) == len(facts):
        computing = mean(
            [
                sum(c.phases.get(n, 0.0) for n in COMPUTE_AND_REST) / c.length
                for own in table.cells
                for c in own
                if c.length
            ]
        )
        used = statistics.median(shares)
        idle = computing - used
        seconds = idle * table.step_seconds - starved_seconds
        if seconds > LEAST_SHARE * table.step_seconds and computing > 0 and used / computing < _DEVICE_IDLE:
            evidence = (
                f"accelerators are busy {format_share(used)} of the time; forward, backward and optimizer take "
                f"{format_share(computing)}",
            )
            gain = Gain(seconds, "computing time in which no accelerator ran anything")
            fixes = (
                Fix("launch fewer, larger operations", "model = torch.compile(model)", gain),
                Fix("use a larger batch and a fused optimizer", "torch.optim.AdamW(..., fused=True)"),
            )
            share = seconds / table.step_seconds
            title = f"accelerators wait for the host to launch operations: {format_cost(seconds, share)}"
            found.append(
                Finding("launch", title, seconds, share, evidence=evidence, fixes=fixes, confidence="medium")
            )
    return [*found, *_full_devices(table, facts)]


def _full_devices(table: StepTable, facts: Sequence[CpuFacts]) -> list[Finding]:
    """Find accelerators without free memory whose steps are irregular. A spike of one stops all: one cost."""
    shares = {row: each.gpu_full_share or 0.0 for row, each in enumerate(facts)}
    full = {row: share for row, share in shares.items() if share >= _DEVICE_FULL}
    if not full:
        return []
    spikes = max(_spike_seconds(table, row) for row in full)
    share = spikes / table.step_seconds
    if share < LEAST_SHARE:
        return []
    ranks = tuple(table.ranks[row] for row in full)
    fullest = max(full.values())
    evidence = (
        f"accelerator memory is {format_share(fullest)} full, and steps above the median cost "
        f"{format_seconds(spikes)} a step",
    )
    fix = Fix(
        "leave the allocator room: a smaller batch, or segments that grow",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", Gain(spikes, "mean step less the median step"),
    )  # fmt: skip
    many, who = len(ranks) != 1, name_ranks(ranks, most=SHOWN_RANKS)
    title = f"{who} {'are' if many else 'is'} short of accelerator memory: {format_cost(spikes, share)}"
    return [Finding("memory", title, spikes, share, ranks, (), "", evidence, (fix,), "low")]


def _spike_seconds(table: StepTable, row: int) -> float:
    lengths = [cell.length for cell in table.cells[row]]
    return max(0.0, mean(lengths) - statistics.median(lengths))


# More ranks than cores, or more threads than cores: known from what was started, and first in the verdict.
#
# [Note: the cost of sharing cores] Of ranks that share cores, the kernel reports how long each was ready and
# waited for one: in computing, and in exchanges, whose messages it sends and adds. That delays the others, too:
# where such waits are most of the time in which a rank has no core, a step is taken to become as long as a rank's
# CPU time, but not below c / n of it for n ranks on c cores. Without the kernel's figure n ranks that compute at
# the same time are taken to get c / n of a core each.


_LEAST_CROWD = 0.05
"""Fraction of a step that ranks wait for cores: with what else a machine does, some wait is always."""
_THREADS_COST = 1 / 3
"""Fraction of computing that threads beyond the cores are assumed to cost; see docs/check/slow.md."""


def find_crowded(table: StepTable) -> list[Finding]:
    """Find machines with more ranks than cores."""
    found = []
    for rows in rows_by_machine(table):
        machine = table.records.facts.get("cores")
        cores = cores_together(table, rows) or (machine if type(machine) is int else 0)
        if not 0 < cores < len(rows):
            continue
        waits = [_queued(table, row) for row in rows]
        known = [wait for wait in waits if wait is not None]
        part = 1 - cores / len(rows)
        computing = [computing_of(table, row) for row in rows]
        seconds = waited = statistics.median(known) if known else part * statistics.median(computing)
        idle = min([part, *(1 - own for row in rows if (own := _process_cores(table, row)) is not None)])
        if seconds > 0.5 * idle * table.step_seconds:
            seconds = max(seconds, idle * table.step_seconds)
        seconds = min(seconds, table.step_seconds)
        share = seconds / table.step_seconds
        if share < _LEAST_CROWD:
            continue
        ranks = tuple(table.ranks[row] for row in rows)
        hosts = tuple(dict.fromkeys(table.records.timelines[row].host for row in rows))
        core_word = f"{cores} core{'s' * (cores != 1)}"
        evidence = (
            (
                f"a rank was ready and waited for a core {format_share(waited / table.step_seconds)} of the time "
                "(median of the ranks), and for ranks that did"
            )
            if known
            else f"ranks that compute together get {format_share(1 - part)} of a core each"
        )
        fewer = max(1, table.records.size * cores // len(rows))
        all_cores = machine if type(machine) is int else 0
        gain = Gain(seconds, "each rank then has a core of its own; a step then has fewer samples")
        holds = ", each of which then holds more of the model" if table.records.plan.get("zero") else ""
        fix = Fix(
            f"start {fewer} rank{'s' * (fewer != 1)}{holds}, or use more hosts; larger batches keep the global "
            "batch",
            command_with(table.records, size=fewer),
            gain,
        )
        if all_cores >= len(rows) == len(table.ranks):  # the figure is of the machine that started them
            listed = table.records.timelines[rows[0]].setup.get(events.SETUP_CORE_LIST)
            what = (
                f"let the ranks use all {all_cores} cores: the script, taskset or a batch system keeps them on "
                f"{listed}"
            )
            fix = Fix(what, gain=Gain(seconds, "each rank then has a core of its own"))
        title = f"{len(rows)} ranks share {core_word}: {format_cost(seconds, share)}"
        found.append(Finding("crowded", title, seconds, share, ranks, hosts, "", (evidence,), (fix,)))
    return found


def find_threads(table: StepTable) -> list[Finding]:
    """Find ranks whose CPU operations use more threads than the rank has cores."""
    rows = [row for row in range(len(table.ranks)) if has_too_many_threads(table, row)]
    if not rows:
        return []
    seconds = _THREADS_COST * statistics.median([computing_of(table, row) for row in rows])
    share = seconds / table.step_seconds
    if share < LEAST_SHARE:
        return []
    ranks = tuple(table.ranks[row] for row in rows)
    setup = table.records.timelines[rows[0]].setup
    threads, cores = setup[events.SETUP_THREADS], setup[events.SETUP_CORES]
    core_word = f"{cores} core{'s' * (cores != 1)}"
    who, verb = name_ranks(ranks, most=SHOWN_RANKS), "has" if len(ranks) == 1 else "have"
    title = f"{who} {verb} {threads} threads on {core_word}: {format_cost(seconds, share)} is assumed"
    evidence = (
        f"threads of torch's operations wait for each other in every operation; {core_word} "
        f"run{'s' * (cores == 1)} {cores} at a time",
    )
    gain = Gain(seconds, f"{format_share(_THREADS_COST)} of computing is assumed; it may be nothing, or far more")
    fix = Fix(
        "use as many threads as cores", f"torch.set_num_threads({cores})", gain, {events.SETUP_THREADS: cores}
    )
    return [Finding("threads", title, seconds, share, ranks, (), "", evidence, (fix,), "low")]


def has_too_many_threads(table: StepTable, row: int) -> bool:
    """Whether a rank computes on the CPU with more threads than cores."""
    setup = table.records.timelines[row].setup
    threads, cores = setup.get(events.SETUP_THREADS), setup.get(events.SETUP_CORES)
    on_cpu = setup.get(events.SETUP_DEVICE) == "cpu"
    return on_cpu and type(threads) is int and type(cores) is int and threads > cores > 0


def _process_cores(table: StepTable, row: int) -> float | None:
    return facts_of(table.records.timelines[row].samples).process_cores


def _queued(table: StepTable, row: int) -> float | None:
    share = facts_of(table.records.timelines[row].samples).core_wait_share
    return None if share is None else share * mean([cell.length for cell in table.cells[row]])


def with_first(findings: Sequence[Finding], *, several_hosts: bool) -> list[Finding]:
    """Return the findings, those first that were known before the start: others may follow from them.

    What costs far less than another finding does not cause it, and keeps its place; nor does it cause what a slow
    link or, between hosts, the network costs more than it.
    """
    most = max((finding.seconds for finding in findings), default=0.0)
    wires = [each for each in findings if sources_of(each) == (COMMUNICATION,)]  # slow links are between hosts
    wire = max((each.seconds for each in wires if several_hosts or each.kind == "slow-link"), default=0.0)
    least = max(_CAUSES * most, wire)
    return sorted(findings, key=lambda each: each.kind not in FIRST or each.seconds < least)


FIRST = frozenset({"crowded", "threads"})
"""Kinds that come first in the verdict."""
_CAUSES = 0.25
"""Fraction of the costliest finding's cost from which such a kind may be its cause."""

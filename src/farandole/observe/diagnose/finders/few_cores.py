"""More ranks than cores, or more threads than cores: known from what was started, and first in the verdict.

[Note: the cost of sharing cores] Of ranks that share cores, the kernel reports how long each was ready and
waited for one: in computing, and in exchanges, whose messages it sends and adds. That delays the others, too:
where such waits are most of the time in which a rank has no core, a step is taken to become as long as a rank's
CPU time, but not below c / n of it for n ranks on c cores. Without the kernel's figure n ranks that compute at the
same time are taken to get c / n of a core each.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ....core.vocabulary import events
from ....core.vocabulary.rank_lists import name_ranks
from ....core.vocabulary.units import format_share
from ...figures.figures import mean
from ..facts.finding import LEAST_SHARE, SHOWN_RANKS, Finding, Fix, Gain, format_cost
from ..facts.proposals import command_with
from ..facts.step_table import StepTable, computing_of, cores_together, rows_by_machine
from .disjoint import COMMUNICATION, sources_of
from .host_facts import facts_of

_LEAST_CROWD = 0.05
"""Fraction of a step that ranks wait for cores: with what else a machine does, some wait is always."""
_THREADS_COST = 1 / 3
"""Fraction of computing that threads beyond the cores are assumed to cost; see docs/diagnose.md."""


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

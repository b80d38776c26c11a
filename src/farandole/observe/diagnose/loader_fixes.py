"""What would shorten a wait for data: workers as far as cores are free, or less to do for a sample.

[Note: workers need cores] A batch that is made by the training thread costs its wait, of which the CPU part is
recorded; where it was ready and had no core, it wanted to work too. With n workers, which load ahead, a step
takes the longest of three: the rest of the step, the time of a batch over n, and all CPU work of a step over the
cores that a rank and its workers may use. Where the CPU work fills these cores already, workers gain nothing:
then fewer CPU seconds a sample help, or more cores.

[Note: a thread shares the lock] A thread of `fd.prefetch` loads ahead, too, but in the process that trains:
Python's lock (GIL) is with one of the two at a time. How much of a batch's CPU work holds it is not recorded, so
all of it is taken to: a step then takes the longer of a batch's time, and the rest of the step with that CPU work.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.step_model import CANDIDATES
from ...core.vocabulary import events
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.events import DATA, SETUP_CODABLE
from ...core.vocabulary.units import format_bytes, format_seconds, format_share
from ..figures.figures import low_median, mean
from ..figures.inexact import codec_of
from .finding import LEAST_SHARE, Finding, Fix, Gain, command_with, format_cost
from .host_facts import facts_of
from .network import LinkObservation
from .step_table import StepTable, cores_of, cores_together, rows_by_machine

_MANY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_NEARLY = 1.02
_SLACK = 1.25
"""Times a usual batch that workers should keep up with: batches differ."""
_CPU_PART = 0.6
"""Fraction of a wait from which it counts as CPU work."""
_RESTS = 0.2
"""Fraction of their time below which workers compute so little that they wait for something else."""
_IDLE_CORES = 0.3
"""Cores for each rank below which workers find none free."""


@dataclass(frozen=True)
class LoaderFacts:
    """How the loaders of some ranks load. None: not known."""

    workers: int | None
    wait_seconds: float
    """A step."""
    step_seconds: float
    cpu_seconds: float | None
    """CPU time of the training thread in the wait, and the time in which it was ready and had no core."""
    cores: float
    """Cores that a rank and its workers may use without taking them from another rank."""
    computing_cores: float
    """Cores that a rank uses while it computes."""
    idle_cores: float | None
    """Cores of the machine that were idle, for each rank."""
    worker_cores: float | None = None
    """Cores that the workers of a rank used."""
    is_prefetched: bool = False
    """Whether a thread draws ahead of the training; without workers, CPU time of a batch is the thread's."""

    @property
    def worker_share(self) -> float | None:
        """The part of their time in which the workers computed."""
        return (
            None if self.worker_cores is None or not self.workers else min(1.0, self.worker_cores / self.workers)
        )

    @property
    def is_cpu_work(self) -> bool:
        """Whether making a batch is CPU work; with workers: whether no core was idle while they wanted one."""
        if self.workers:
            rests = self.worker_share is not None and self.worker_share < _RESTS
            return self.idle_cores is not None and self.idle_cores < _IDLE_CORES and not rests
        return self.cpu_seconds is not None and self.cpu_seconds >= _CPU_PART * self.batch_seconds

    @property
    def batch_seconds(self) -> float:
        """Return how long a batch takes that no worker makes: a thread ahead that is waited for never rests."""
        return self.step_seconds if self.is_prefetched else self.wait_seconds

    def step_with(self, workers: int, slack: float = 1.0) -> float:
        """Return the step with so many workers, where a batch takes `slack` times as long as a usual one.

        See [Note: workers need cores].
        """
        rest = max(0.0, self.step_seconds - self.wait_seconds)
        # A worker that never rests takes as long for a batch as all of them for as many batches as there are.
        batch = slack * (self.batch_seconds if not self.workers else self.workers * self.step_seconds)
        if self.workers:
            return self.step_seconds if self.is_cpu_work else max(rest, batch / workers)
        work = self.computing_cores * rest + (self.cpu_seconds or 0.0)
        return max(rest, batch / workers, work / self.cores)

    @property
    def step_prefetched(self) -> float | None:
        """Return the step with a thread that draws ahead; None: not known.

        See [Note: a thread shares the lock].
        """
        if self.workers or self.is_prefetched or self.cpu_seconds is None:
            return None
        return max(self.step_seconds - self.wait_seconds + self.cpu_seconds, self.wait_seconds)


def loader_facts(table: StepTable, rows: Sequence[int], wait_seconds: float) -> LoaderFacts:
    """Return the facts about the ranks of some rows of the table, which wait so long in a step."""
    timelines = [table.records.timelines[row] for row in rows]
    setups = [timeline.setup for timeline in timelines]
    workers = [value for setup in setups if type(value := setup.get(events.SETUP_WORKERS)) is int]
    cpu = [row.data_cpu_seconds for own in rows for row in table.rows[own] if row.data_cpu_seconds is not None]
    here = next(found for found in rows_by_machine(table) if rows[0] in found)
    neighbours = len(here)
    machine = _number(table.records.facts.get("cores"))
    own = float(_usual([_number(cores_of(table, row)) for row in rows]) or 1.0)
    wide = max(own, _usual([_number(setup.get(events.SETUP_WORKER_CORES)) for setup in setups]) or own)
    together = cores_together(table, here) or min(own * neighbours, machine or math.inf)
    rank_cores = max(0.1, min(own, together / neighbours))
    cores = rank_cores + (wide - own) / neighbours
    busy = _usual([facts_of(timeline.samples).machine_share for timeline in timelines])
    idle = None if busy is None or machine is None else machine * (1 - busy) / neighbours
    threads = _usual([_number(setup.get(events.SETUP_THREADS)) for setup in setups]) or 1.0
    if idle is not None and 0 in workers:
        used = _usual([facts_of(timeline.samples).process_cores for timeline in timelines]) or 1.0
        cores = max(min(rank_cores, 1.0), min(cores, used + idle))
    queued = _usual([facts_of(timeline.samples).core_wait_share for timeline in timelines]) or 0.0
    needed = min(wait_seconds, mean(cpu) + queued * table.step_seconds) if cpu else None
    is_prefetched = any(setup.get(events.SETUP_PREFETCH) for setup in setups)
    if is_prefetched:
        thread = _usual([facts_of(timeline.samples).thread_cores for timeline in timelines])
        needed = None if thread is None else min(thread, 1.0) * table.step_seconds
    return LoaderFacts(
        statistics.median_low(workers) if workers else None, wait_seconds, table.step_seconds,
        needed, cores, min(threads, rank_cores), idle,
        _usual([facts_of(timeline.samples).children_cores for timeline in timelines]), is_prefetched,
    )  # fmt: skip


def loader_fixes(facts: LoaderFacts) -> tuple[list[str], list[Fix]]:
    """Return the evidence and the fixes, the best first."""
    evidence = _evidence(facts)
    now = facts.workers or 0
    steps = {count: facts.step_with(count, _SLACK) for count in _MANY if count > now}
    best = min(steps.values(), default=facts.step_seconds)
    count = next((count for count, step in steps.items() if step <= _NEARLY * best), None)
    saved = 0.0 if count is None else min(facts.wait_seconds, facts.step_seconds - facts.step_with(count))
    fixes = []
    if count is not None and saved >= max(LEAST_SHARE * facts.step_seconds, 0.1 * facts.wait_seconds):
        where = "a process of its own" if count == 1 else f"{count} processes of their own"
        fixes.append(
            Fix(
                f"{count} workers instead of {now}" if now else f"load batches ahead of time in {where}",
                f"num_workers={count}, prefetch_factor=4, persistent_workers=True  # arguments of the DataLoader",
                Gain(saved, _basis(facts, count)),
                {"loader_workers": count},
            )
        )
    if thread := _thread_fix(facts):
        fixes.append(thread)
    less = "do less for a sample: decode and resize once and keep the result, or use a cheaper decoder"
    if facts.is_cpu_work:
        more_cores = "; or give each rank more cores (fewer ranks on a host)"
        gain = Gain(
            facts.wait_seconds, "the CPU work of a batch that is left, if nothing remains to do for a sample"
        )
        fixes.append(Fix(less + more_cores, "", gain if not fixes else None))
    else:
        fixes.append(Fix(f"{less}; or a faster place for the data"))
    return evidence, fixes


def _thread_fix(facts: LoaderFacts) -> Fix | None:
    step = facts.step_prefetched
    saved = 0.0 if step is None else min(facts.wait_seconds, facts.step_seconds - step)
    if saved < max(LEAST_SHARE * facts.step_seconds, 0.1 * facts.wait_seconds):
        return None
    basis = (
        f"the longer of: a batch's {format_seconds(facts.wait_seconds)}, and the rest of the step with the "
        f"{format_seconds(facts.cpu_seconds or 0.0)} of CPU work of a batch, as if all of it held Python's lock"
    )
    return Fix(
        "load batches in a thread of this process, ahead of time",
        "loader = fd.prefetch(loader)",
        Gain(saved, basis),
        {events.SETUP_PREFETCH: 2},
    )


def capped(fix: Fix, seconds: float) -> Fix:
    """Return a fix that gains no more than so much."""
    gain = fix.gain
    return fix if gain is None else replace(fix, gain=replace(gain, seconds=min(gain.seconds, seconds)))


def _evidence(facts: LoaderFacts) -> list[str]:
    lines = []
    if not facts.workers and facts.is_prefetched:
        share = None if facts.cpu_seconds is None else facts.cpu_seconds / facts.step_seconds
        used = "" if share is None else f", and computes {format_share(share)} of the time"
        lines.append(f"a thread of fd.prefetch loads the batches{used}")
    elif facts.workers == 0 and facts.cpu_seconds is not None and facts.wait_seconds > 0:
        share = min(1.0, facts.cpu_seconds / facts.wait_seconds)
        lines.append(
            f"the training thread loads its batches itself (num_workers=0), and {format_share(share)} of the "
            "wait it works on the CPU or is ready to"
        )
    elif facts.workers:
        many = f"{facts.workers} worker{'s' * (facts.workers != 1)} of each rank load{'s' * (facts.workers == 1)}"
        if facts.is_cpu_work:
            lines.append(f"{many}, and no core is idle: more workers would not get one")
        else:
            rests = facts.worker_share is not None and facts.worker_share < _RESTS
            why = "hardly compute" if rests else "cores are idle"
            lines.append(f"{many}, and {why}: they wait for a disk, a network or a lock")
    if facts.is_cpu_work:
        cores = f"{facts.cores:.2g} core{'s' * (facts.cores != 1)}"
        lines.append(f"a rank and its workers have {cores} for it and for computing")
    return lines


def _basis(facts: LoaderFacts, count: int) -> str:
    if facts.workers:
        return (
            f"{facts.workers} worker{'s make' if facts.workers > 1 else ' makes'} a batch in "
            f"{format_seconds(facts.step_seconds)}; {count} in proportion"
        )
    return (
        f"the longest of: the rest of the step, a batch's {format_seconds(facts.batch_seconds)} over {count} "
        f"workers, and the CPU work of a step over {facts.cores:.2g} cores"
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def _usual(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# Ranks that all wait for their data; one that waits alone is a straggler.


def find_input(table: StepTable) -> list[Finding]:
    """Find ranks that all wait for their data."""
    seconds = mean([low_median([cell.phases.get(DATA, 0.0) for cell in cells]) for cells in table.by_step()])
    share = seconds / table.step_seconds
    if share < LEAST_SHARE:
        return []
    medians = [statistics.median([cell.phases.get(DATA, 0.0) for cell in own]) for own in table.cells]
    facts = loader_facts(table, range(len(table.cells)), seconds)
    reasons, fixes = loader_fixes(facts)
    by_rank = (
        f"data wait by rank: {format_seconds(min(medians))} to {format_seconds(max(medians))} a step (median)"
    )
    who = "all ranks wait" if len(medians) > 1 else "the rank waits"
    what = "data, which costs CPU time" if facts.is_cpu_work else "data"
    title = f"{who} for {what}: {format_cost(seconds, share)}"
    return [
        Finding(
            "input", title, seconds, share, phase=DATA, evidence=(*reasons, by_rank), fixes=tuple(fixes)
        )
    ]  # fmt: skip


# What another codec would save: its bytes replayed over the run's link, and its measured CPU time.
#
# [Note: bytes of a codec] Codecs of elements send a share of the bytes that does not depend on the model. A low-
# rank codec sends rank x (rows + columns) numbers of a matrix, and records know the bytes of a bucket and its
# parameters, not their shapes: they are taken to be square and alike, which is the least that such a codec can
# send. What keeps the chosen elements only sends them to every rank, so its share grows with their number.


CodecCosts = Mapping[str, float]
"""CPU seconds per byte of float32, for encoding and decoding, by codec."""

LOW_RANK = CANDIDATES[-1]
SPARSE = "topk:0.01"
PREDICTED = (*CANDIDATES[1:], SPARSE)
"""Codecs whose gain is estimated: those that codec "auto" chooses from, smallest loss first, and a sparse one."""
_GAINS = 1.1
_LOSES = {
    "bf16": "rounds gradients to 16 bits",
    LOW_RANK: "keeps a matrix of rank 4, the rest is sent later: compare the loss",
    SPARSE: "sends the largest 1%; the rest is sent later",
}


def codec_fixes(table: StepTable, network: LinkObservation, usual: int, costs: CodecCosts | None) -> list[Fix]:
    """Return the codecs with a gain, the least lossy first, and how the gain is estimated."""
    current = _element_ratio(codec_of(table.records))
    if current is None:
        return []  # a codec whose bytes depend on shapes or density: nothing to estimate from
    share = table.records.timelines[0].setup.get(SETUP_CODABLE)
    coded = float(share) if isinstance(share, (int, float)) else 1.0
    current = _of_all(coded, current)
    fixes: list[Fix] = []
    is_by_row = table.records.plan.get("zero") in (1, 2)  # each element goes to one rank
    chosen: tuple[float, str] | None = None
    best = 0.0
    for name in PREDICTED:
        ratio = codec_ratio(table, name) if CodecSpec.parse(name).is_quantized or not is_by_row else None
        cost = None if costs is None else costs.get(name)
        ratio = None if ratio is None else _of_all(coded, ratio)
        if ratio is None or ratio / current > 0.9 or (cost is None and (costs is not None or name == SPARSE)):
            continue  # finding the largest is slow: nothing is said of it without its measured time
        predicted = network.exposed_with_codec(ratio / current, cost or 0.0)
        saved = usual * (network.exposed_seconds - predicted)
        # A codec that loses more must make the step shorter than a gentler one does: by a tenth at least.
        if saved < LEAST_SHARE * table.step_seconds or (
            best > 0 and _GAINS * (table.step_seconds - saved) > table.step_seconds - best
        ):
            continue
        best = saved
        loses = _LOSES.get(name, "loses precision, which is sent later")
        gain = Gain(saved, _codec_basis(network, ratio / current, cost, name))
        changes = {"codec": name}
        fixes.append(Fix(f"codec {name} ({loses})", command_with(table.records, changes), gain, changes))
        # Buffers of Keras and TensorFlow are flat: what is chosen for them is no codec of matrices.
        if name != SPARSE and not (table.front_end and name == LOW_RANK):
            chosen = (saved, name)
    if chosen is not None and not is_by_row:
        gain = Gain(chosen[0], f"that of {chosen[1]}, the best of the codecs it chooses from, or more")
        what = "the codec that is best for each bucket by measurement, chosen while it trains (may lose precision)"
        automatic = {"codec": "auto", "lossy": True}
        fixes.append(Fix(what, command_with(table.records, automatic), gain, automatic))
    return fixes


def _of_all(coded: float, ratio: float) -> float:
    """Return the bytes of all gradients beside those of float32, of which a codec takes the share `coded`."""
    return coded * ratio + 1 - coded


def codec_ratio(table: StepTable, name: str) -> float | None:
    """Return a codec's bytes beside those of float32, or None where records do not tell.

    See [Note: bytes of a codec].
    """
    spec = CodecSpec.parse(name)
    if spec.is_low_rank:
        return _low_rank_ratio(table, spec)
    per_element = spec.bytes_per_element(1, ranks=table.records.size)
    return None if per_element is None else per_element / 4


def _element_ratio(codec: str) -> float | None:
    """Return the same for a codec whose bytes depend on nothing else; None for others and for unknown ones."""
    try:
        spec = CodecSpec.parse(codec)
    except PlanError:
        return None
    if not (spec.is_exact or spec.is_quantized):
        return None
    return (spec.bytes_per_element(1) or 4.0) / 4


def _low_rank_ratio(table: StepTable, spec: CodecSpec) -> float | None:
    layouts = table.records.timelines[0].layouts
    buckets = [b for b in layouts[-1][1].buckets if b.nbytes > 0 and b.parameters] if layouts else []
    total = sum(bucket.nbytes for bucket in buckets)
    if total == 0:
        return None
    sent = 0.0
    for bucket in buckets:
        side = math.sqrt(bucket.nbytes / 4 / len(bucket.parameters))
        # Factors of half the matrix or more are not used: it then travels as it is.
        share = (spec.bytes_per_element(side, side) or 4.0) / 4
        sent += bucket.nbytes * (share if share < 0.5 else 1.0)
    return sent / total


def _codec_basis(network: LinkObservation, ratio: float, cost: float | None, name: str) -> str:
    text = (
        f"bytes / bandwidth + rounds x latency, replayed with {format_bytes(network.sent_bytes * ratio)} "
        f"instead of {format_bytes(network.sent_bytes)}"
    )
    if name == LOW_RANK:
        text += " (if matrices are about square)"
    if cost is None:
        return f"{text}; the codec's CPU time is not included"
    speed = format_bytes(1 / cost) if cost > 0 else "any number of bytes"
    return f"{text}; the codec takes {speed} per CPU second, as measured, before each bucket is sent"

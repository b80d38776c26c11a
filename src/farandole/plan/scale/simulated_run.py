"""A simulated run: every rank in every step, as the records that a real run writes.

This is the simulation of all ranks that the one by roles (`step_roles`) is checked against: the same step, with
each replica on its own. What comes out are events of core/vocabulary; observe/record writes them.

[Note: what a simulated rank records] Waiting for data, each action of the schedule, waits for another stage, one
exchange with its buckets, and the optimizer. Ranks of a cell keep in step, so they record the cell's times. Each
rank hands a bucket over when its own gradients are ready, and has it when the slowest rank's sum is there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.schedule.actions import FORWARD
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import (
    BACKWARD,
    OPTIMIZER,
    PIPELINE_WAIT,
    SETUP_PIPELINE,
    SETUP_PIPELINE_CUTS,
    SETUP_PIPELINE_RANK,
    BucketFacts,
    BucketLayout,
    BucketTimes,
    DataWait,
    Event,
    Exchange,
    LinkTraffic,
    Phase,
    PipelineAction,
    Setup,
    Started,
    StepDone,
    Traffic,
)
from ...core.vocabulary.events import FORWARD as FORWARD_PHASE
from .noise import Noise
from .step_roles import StepTimes, one_step, ready_seconds
from .step_work import StepWork

MOST_RANKS = 256
"""Each rank is a file; what more ranks do is in the table, which simulates roles alone."""
MOST_BUCKETS = 2_000
CLOCK = "simulated"
"""All ranks have one clock."""
_TRAFFIC_SECONDS = 2.0


@dataclass(frozen=True)
class SimulatedJob:
    """A job to simulate rank by rank."""

    work: StepWork
    ranks_per_host: int
    steps: int = 40
    noise: Noise = field(default_factory=Noise)
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """How many times its usual time a rank's computing takes."""
    slow_links: Mapping[int, float] = field(default_factory=dict)
    """How many times its usual time an exchange over a host's link takes, by number of the host."""
    codec: str = "none"
    cuts: tuple[str, ...] = ()
    """First module of each stage but the first."""
    seed: int = 0

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.work.ranks // self.ranks_per_host)


def slowed(work: StepWork, slow_links: Mapping[int, float]) -> StepWork:
    """Return `work` with exchanges over the slowest link, which all ranks of an exchange wait for."""
    factor = max(slow_links.values(), default=1.0)
    link = replace(work.link, bytes_per_second=work.link.bytes_per_second / factor)
    return replace(work, link=link, exposed_seconds=work.exposed_seconds * factor)


def job_events(job: SimulatedJob) -> Iterator[tuple[int, Event]]:
    """Return what every rank records, as (rank, event). See [Note: what a simulated rank records].

    Raises:
        ConfigError: there are too many ranks or buckets to write down, or a slow rank or link that is not there.
    """
    _refuse(job)
    return _events(job)


def _events(job: SimulatedJob) -> Iterator[tuple[int, Event]]:
    yield from _first_events(job)
    work = slowed(job.work, job.slow_links)
    draw = random.Random(job.seed)
    cells = [work.cell_of(rank) for rank in range(work.ranks)]
    begins = [(0.0,) * work.degrees.pipeline for _ in range(work.replicas)]
    usual = _by_cell(work, [job.slow_ranks.get(rank, 1.0) for rank in range(work.ranks)])
    counted = 0.0
    for step in range(1, job.steps + 1):
        drawn = [job.slow_ranks.get(rank, 1.0) * job.noise.quantile(draw.random()) for rank in range(work.ranks)]
        times = one_step(work, _by_cell(work, drawn), begins, usual)
        for rank, (place, replica) in enumerate(cells):
            for event in _step_events(work, times, place, replica, begins[replica][place]):
                yield rank, event
            yield rank, StepDone(step, times.ends[replica][place])
        begins = list(times.ends)
        if times.end_seconds - counted >= _TRAFFIC_SECONDS or step == job.steps:
            yield from _traffic(job, counted, times.end_seconds, step)
            counted = times.end_seconds


def _by_cell(work: StepWork, factors: Sequence[float]) -> list[list[float]]:
    """Return the factor of the slowest rank of each cell, by replica and rank of the pipeline."""
    found = [[0.0] * work.degrees.pipeline for _ in range(work.replicas)]
    for rank, factor in enumerate(factors):
        place, replica = work.cell_of(rank)
        found[replica][place] = max(found[replica][place], factor)
    return found


def host_name(number: int) -> str:
    """Return the name of a simulated host."""
    return f"simulated-{number}"


def _refuse(job: SimulatedJob) -> None:
    work = job.work
    if work.ranks > MOST_RANKS:
        raise ConfigError(
            f"a simulated run of {work.ranks} ranks: at most {MOST_RANKS} are written down, each in a file",
            remedy=f"give --run-dir with a size of at most {MOST_RANKS}",
        )
    buckets = max(map(len, work.buckets))
    if buckets > MOST_BUCKETS:
        raise ConfigError(
            f"a simulated run with {buckets} buckets a step: at most {MOST_BUCKETS} are written down",
            remedy="set a larger bucket_bytes in the plan",
        )
    if job.steps < 1:
        raise ConfigError(f"a simulated run of {job.steps} steps: expected at least 1")
    for what, numbers, count in (("rank", job.slow_ranks, work.ranks), ("host", job.slow_links, job.hosts)):
        for number in numbers:
            if not 0 <= number < count:
                raise ConfigError(f"slow {what} {number}: the job has {what}s 0 to {count - 1}")


def _first_events(job: SimulatedJob) -> Iterator[tuple[int, Event]]:
    work = job.work
    for rank in range(work.ranks):
        host = host_name(rank // job.ranks_per_host)
        yield rank, Started(rank, work.ranks, host, 0, 0, 0.0, "simulated", CLOCK)
        place, _ = work.cell_of(rank)
        if work.buckets[place]:
            facts = tuple(BucketFacts(each.nbytes, job.codec, ()) for each in work.buckets[place])
            yield rank, BucketLayout("flat", facts)
        if work.degrees.pipeline > 1:
            schedule = work.schedule
            chunks = schedule.stages // schedule.ranks
            text = f"{schedule.name} {schedule.ranks} {schedule.micro_batches} {chunks}"
            yield (
                rank,
                Setup({SETUP_PIPELINE: text, SETUP_PIPELINE_RANK: place, SETUP_PIPELINE_CUTS: " ".join(job.cuts)}),
            )


def _step_events(
    work: StepWork, times: StepTimes, place: int, replica_number: int, begin: float
) -> Iterator[Event]:
    replica = times.replicas[replica_number]
    at = replica.begins[place]
    yield DataWait(begin, at, work.rank_samples)
    for span in replica.spans:
        if span.rank != place:
            continue
        if span.begin_seconds > at:
            yield Phase(PIPELINE_WAIT, at, span.begin_seconds)
        at = span.end_seconds
        if work.degrees.pipeline > 1:
            action = span.action
            yield PipelineAction(action.stage, action.kind, action.micro_batch, span.begin_seconds, at)
        else:
            yield Phase(FORWARD_PHASE if span.action.kind == FORWARD else BACKWARD, span.begin_seconds, at)
    done = times.exchanged[replica_number][place]
    if work.exchanges:
        buckets = _bucket_times(work, times, place, replica_number)
        launches = tuple(each.launch_seconds for each in buckets) or (replica.backward[place][1],)
        sent = sum(each.sent_bytes for each in buckets)
        yield Exchange(launches, at, max(at, done), sent, buckets)
    yield Phase(OPTIMIZER, max(at, done), times.ends[replica_number][place])


def _bucket_times(work: StepWork, times: StepTimes, place: int, replica_number: int) -> tuple[BucketTimes, ...]:
    replica, found, free = times.replicas[replica_number], [], -float("inf")
    for bucket, span in zip(work.buckets[place], times.buckets[place], strict=True):
        first, ready = (ready_seconds(replica, place, share) for share in (bucket.first_share, bucket.ready_share))
        begin = max(ready, free)
        free = span.end_seconds
        found.append(
            BucketTimes(
                bucket.nbytes, round(bucket.sent_bytes), first, ready, ready, begin, free,
                wait_seconds=max(0.0, span.begin_seconds - begin), codec_seconds=bucket.codec_seconds,
                rounds=round(bucket.rounds),
            )
        )  # fmt: skip
    return tuple(found)


def _traffic(job: SimulatedJob, begin: float, end: float, step: int) -> Iterator[tuple[int, Event]]:
    """Yield what the last rank of each host sent to the next one: a ring goes from host to host."""
    if job.hosts < 2 or not any(job.work.buckets):
        return
    mean = end / step
    for host in range(job.hosts):
        rank = min(job.work.ranks, (host + 1) * job.ranks_per_host) - 1
        place, _ = job.work.cell_of(rank)
        other = (host + 1) % job.hosts
        sent = (end - begin) / mean * sum(each.sent_bytes for each in job.work.buckets[place])
        factor = max(job.slow_links.get(host, 1.0), job.slow_links.get(other, 1.0))
        busy = min(end - begin, sent * factor / job.work.link.bytes_per_second)
        link = LinkTraffic(host_name(host), host_name(other), round(sent), busy)
        yield rank, Traffic(end, end - begin, (link,))

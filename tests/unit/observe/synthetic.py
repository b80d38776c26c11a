"""Runs of virtual ranks on virtual clocks, whose truth is known: written by the real writer, no process, no sleep.

Every rank draws its phases, its buckets become ready evenly through backward, and one link carries them once the
last rank has launched each: in order (``bytes / bandwidth + rounds x latency``), as the diagnosis itself assumes,
or all of them at once, as streams do that share a link. Clocks of hosts may be off and drift.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farandole.core.vocabulary.events import (
    BucketFacts,
    BucketLayout,
    BucketTimes,
    ClockOffset,
    DataWait,
    Exchange,
    LinkTraffic,
    Logged,
    Phase,
    Sample,
    Setup,
    Started,
    StepDone,
    Traffic,
)
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

WORK = ("data", "forward", "loss", "backward", "optimizer")

Extra = Callable[[int, int], float]
"""Seconds more, by rank and step."""


@dataclass(frozen=True)
class Machine:
    """What a virtual run is like. Seconds and bytes; every field has the value of a healthy run."""

    ranks: int = 4
    hosts: Sequence[str] = ("a",)
    """Ranks are dealt to them in contiguous parts."""
    steps: int = 60
    seconds: Mapping[str, float] = field(
        default_factory=lambda: {
            "data": 0.0005, "forward": 0.030, "loss": 0.0005, "backward": 0.060, "optimizer": 0.006
        }
    )  # fmt: skip
    noise: float = 0.01
    """Standard deviation of each phase, as a share of it."""
    extra: Mapping[str, Extra] = field(default_factory=dict)
    """By phase; other names are pauses within forward."""
    bucket_bytes: Sequence[int] = (4_000_000,) * 8
    parameters: Sequence[str] = ()
    """Of each bucket."""
    bytes_per_second: float = 10e9
    latency_seconds: float = 20e-6
    rounds: int = 2
    side_by_side: bool = False
    """Whether buckets share the link instead of following each other."""
    stall: Extra = lambda rank, step: 0.0
    """Of the link, before the last bucket (asked for rank 0)."""
    exchanges: int = 1
    """In a step, one after each backward pass."""
    optimizers: int = 1
    """That step in a step."""
    sent_factor: float = 1.0
    """Bytes sent beside what a ring sends."""
    samples: Callable[[int, int], int] = lambda rank, step: 8
    tokens: Callable[[int, int], int] = lambda rank, step: 800
    loss: Callable[[int], float] = lambda step: 4.0 / step
    late_end: Mapping[int, float] = field(default_factory=dict)
    """By rank: the exchange ends there so much later."""
    first_step_factor: float = 1.0
    clock_offsets: Mapping[str, float] = field(default_factory=dict)
    """By host: its clock less that of rank 0's."""
    drift: float = 0.0
    tells_offsets: bool = True
    sample: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By rank: fields of its samples; none without."""
    blocks_in_backward: bool = False
    """The wait happens inside backward and nobody sees it, as a wrapper's hooks do."""
    congestion_control: str = "cubic"
    ways: Mapping[int, Sequence[LinkTraffic]] = field(default_factory=dict)
    """By rank: what it sends to other hosts in a second."""
    route: str | None = "flat"
    """None: something else than our engine carries the buckets."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of ``run.json``, beside the usual ones."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """What every rank records of its training."""
    setup_of: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By rank, instead of these."""
    data_cpu: float | None = None
    """Fraction of the wait for data that is CPU time of the rank."""
    own_code: Extra = lambda rank, step: 0.0
    """The script's own code before the optimizer's step."""
    exchanges_are_seen: bool = True
    seed: int = 0

    def host_of(self, rank: int) -> str:
        """Return a rank's host."""
        return self.hosts[rank * len(self.hosts) // self.ranks]


class _Rank:
    def __init__(self, machine: Machine, rank: int, directory: Path) -> None:
        self.machine, self.rank = machine, rank
        self.host = machine.host_of(rank)
        self.writer = StepRecorder([EventWriter(directory, rank)])
        self.at = 1000.0
        """True time."""
        self.sampled = self.counted = self.at
        self.writer.record(
            Started(
                rank, machine.ranks, self.host, 1, 0, self.clock(self.at), "2026-01-01", f"clock of {self.host}"
            )
        )
        facts = tuple(
            BucketFacts(n, str(machine.plan.get("codec", "none")), tuple(machine.parameters))
            for n in machine.bucket_bytes
        )
        if machine.route is not None:
            self.writer.record(BucketLayout(machine.route, facts))
        if machine.setup:
            self.writer.record(Setup(machine.setup_of.get(rank, machine.setup)))
        self._tell_offset()

    def clock(self, at: float) -> float:
        """Return what this host's clock shows."""
        offset = self.machine.clock_offsets.get(self.host, 0.0)
        return at + offset + (self.machine.drift * (at - 1000.0) if offset else 0.0)

    def _tell_offset(self) -> None:
        first = self.rank == 0 or self.machine.host_of(self.rank - 1) != self.host
        if self.rank and first and self.machine.tells_offsets and self.host != self.machine.host_of(0):
            shown = self.clock(self.at)
            self.writer.record(ClockOffset(shown, self.at - shown, 50e-6))

    def phase(self, name: str, seconds: float) -> None:
        begin, self.at = self.at, self.at + seconds
        if seconds > 0 and name != "data":
            self.writer.record(Phase(name, self.clock(begin), self.clock(self.at)))

    def end_step(self, step: int) -> None:
        self.writer.record(Logged(self.machine.loss(step), self.machine.tokens(self.rank, step)))
        self.writer.record(StepDone(step, self.clock(self.at)))
        ways = self.machine.ways.get(self.rank)
        if ways is not None and self.at - self.counted >= 2.0:
            span, self.counted = self.at - self.counted, self.at
            sent = [
                replace(w, sent_bytes=int(span * w.sent_bytes), busy_seconds=span * w.busy_seconds) for w in ways
            ]
            self.writer.record(Traffic(self.clock(self.at), span, tuple(sent)))
        facts = self.machine.sample.get(self.rank)
        if facts is not None and self.at - self.sampled >= 1.0:
            self.writer.record(Sample(self.clock(self.at), self.at - self.sampled, **facts))
            self.sampled = self.at
            self._tell_offset()


def write_run(directory: Path, machine: Machine) -> Path:
    """Write the run directory of a virtual run."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = {
        "version": 1, "size": machine.ranks, "command": ["python", "t.py"],
        "plan": {"accumulate": 1, **machine.plan},
        "versions": {"torch": "2"}, "commit": "abc", "cores": 8,
        "congestion_control": machine.congestion_control, **machine.facts,
    }  # fmt: skip
    (directory / "run.json").write_text(json.dumps(facts))
    ranks = [_Rank(machine, rank, directory) for rank in range(machine.ranks)]
    draw = random.Random(machine.seed)
    for step in range(1, machine.steps + 1):
        _step(machine, ranks, step, draw)
    for rank in ranks:
        rank.writer.close()
    return directory


def _step(machine: Machine, ranks: Sequence[_Rank], step: int, draw: random.Random) -> None:
    slow = machine.first_step_factor if step <= 3 else 1.0

    def lasts(name: str, rank: int) -> float:
        usual: float = machine.seconds[name] * max(0.1, draw.gauss(1, machine.noise)) * slow
        return usual + (machine.extra[name](rank, step) if name in machine.extra else 0.0)

    for rank in ranks:
        begin, seconds = rank.at, lasts("data", rank.rank)
        rank.phase("data", seconds)
        samples = machine.samples(rank.rank, step)
        used = None if machine.data_cpu is None else machine.data_cpu * seconds
        rank.writer.record(DataWait(rank.clock(begin), rank.clock(rank.at), samples, used))
    for _ in range(machine.exchanges):
        for rank in ranks:
            begin = rank.at
            pauses = {n: e(rank.rank, step) for n, e in machine.extra.items() if n not in WORK}
            rank.at += 0.5 * machine.seconds["forward"]
            for name, seconds in pauses.items():
                rank.phase(name, seconds)
            rank.at += lasts("forward", rank.rank) - 0.5 * machine.seconds["forward"]
            rank.writer.record(Phase("forward", rank.clock(begin), rank.clock(rank.at)))
            rank.phase("loss", lasts("loss", rank.rank))
        backwards = [(rank.at, lasts("backward", rank.rank)) for rank in ranks]
        _exchange(machine, ranks, backwards, machine.stall(0, step))
    for rank in ranks:
        rank.at += machine.own_code(rank.rank, step)
        for _ in range(machine.optimizers):
            rank.phase("optimizer", lasts("optimizer", rank.rank) / machine.optimizers)
        rank.end_step(step)


def _exchange(
    machine: Machine, ranks: Sequence[_Rank], backwards: Sequence[tuple[float, float]], stall: float
) -> None:
    if machine.ranks == 1:
        begin, seconds = backwards[0]
        ranks[0].phase("backward", seconds)
        return
    total = sum(machine.bucket_bytes)
    share = 2 * (machine.ranks - 1) / machine.ranks * machine.sent_factor
    before = 0
    sent = [int(share * nbytes) for nbytes in machine.bucket_bytes]
    ready: list[list[tuple[float, float]]] = []
    for nbytes in machine.bucket_bytes:
        ready.append(
            [
                (begin + seconds * before / total, begin + seconds * (before + nbytes) / total)
                for begin, seconds in backwards
            ]
        )
        before += nbytes
    launched = [max(last for _, last in each) for each in ready]
    carry = _side_by_side if machine.side_by_side else _in_order
    spans = carry(machine, launched, sent, stall)
    free = max(end for _, end in spans)
    times: list[list[BucketTimes]] = [
        [
            BucketTimes(
                nbytes, out, clock(first), clock(last), clock(last), clock(max(last, begin)),
                clock(end + machine.late_end.get(i, 0.0)), rounds=machine.rounds,
            )
            for nbytes, out, (begin, end), (first, last) in zip(
                machine.bucket_bytes, sent, spans, [each[i] for each in ready], strict=True
            )
        ]
        for i, clock in enumerate(rank.clock for rank in ranks)
    ]  # fmt: skip
    for i, (rank, (begin, seconds)) in enumerate(zip(ranks, backwards, strict=True)):
        ready_at, done = begin + seconds, free + machine.late_end.get(i, 0.0)
        rank.at = done if machine.blocks_in_backward else ready_at
        rank.writer.record(Phase("backward", rank.clock(begin), rank.clock(rank.at)))
        wait = (done, done) if machine.blocks_in_backward else (ready_at, done)
        launches = tuple(bucket.launch_seconds for bucket in times[i])
        exchange = Exchange(launches, rank.clock(wait[0]), rank.clock(wait[1]), sum(sent), tuple(times[i]))
        if machine.exchanges_are_seen:
            rank.writer.record(exchange)
        rank.at = done


def _in_order(
    machine: Machine, launched: Sequence[float], sent: Sequence[int], stall: float
) -> list[tuple[float, float]]:
    """Return when each bucket is on the link, one after the other; the last one waits for `stall` seconds more."""
    spans: list[tuple[float, float]] = []
    free = 0.0
    for number, (at, nbytes) in enumerate(zip(launched, sent, strict=True), start=1):
        begin = free
        free = max(free, at) + nbytes / machine.bytes_per_second + machine.rounds * machine.latency_seconds
        free += stall if number == len(sent) else 0.0
        spans.append((begin, free))
    return spans


def _side_by_side(
    machine: Machine, launched: Sequence[float], sent: Sequence[int], stall: float
) -> list[tuple[float, float]]:
    """Return when each bucket is on the link, which all that are under way share in equal parts."""
    left, ends = dict(enumerate(map(float, sent))), [0.0] * len(sent)
    now = min(launched)
    while left:
        here = [i for i in left if launched[i] <= now]
        coming = min((launched[i] for i in left if launched[i] > now), default=float("inf"))
        if not here:
            now = coming
            continue
        rate = machine.bytes_per_second / len(here)
        seconds = min(coming - now, min(left[i] for i in here) / rate)
        now += seconds
        for i in here:
            left[i] -= seconds * rate
            if left[i] < 1.0:
                del left[i]
                ends[i] = now + machine.rounds * machine.latency_seconds
    ends[-1] += stall
    return list(zip(launched, ends, strict=True))


def only(rank: int, seconds: float) -> Extra:
    """Return an extra that one rank has in every step."""
    return lambda own, step: seconds if own == rank else 0.0


def every(period: int, seconds: float, rank: int | None = None) -> Extra:
    """Return an extra that comes every so many steps, on one rank or on all."""
    return lambda own, step: seconds if step % period == 0 and rank in (None, own) else 0.0


def healthy(**changes: Any) -> Machine:
    """Return a machine without a fault, with `changes`."""
    return replace(Machine(), **changes)

"""Run directories of version 2 with a known truth, by the real writer: phases, buckets, host facts, two clocks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.core.vocabulary.events import (
    BucketFacts,
    BucketLayout,
    BucketTimes,
    ClockOffset,
    DataWait,
    Exchange,
    Logged,
    Phase,
    Sample,
    Started,
    StepDone,
)
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

PHASES = {"data": 0.004, "forward": 0.030, "loss": 0.001, "backward": 0.060, "optimizer": 0.008}


def full_run(
    directory: Path,
    *,
    ranks: int = 4,
    steps: int = 40,
    buckets: int = 6,
    slow: Mapping[int, Mapping[str, float]] | None = None,
    wire: float = 0.012,
    hosts: Sequence[str] = ("node-a", "node-b"),
    clock_ahead: float = 3600.0,
    pauses: Mapping[int, float] | None = None,
    phase_names: Mapping[int, str] | None = None,
    command: list[str] | None = None,
) -> Path:
    """Write a run: rank r takes `PHASES` and `slow[r]` more; a bucket takes `wire` once all ranks filled it.

    Half of the ranks are on the second host, whose clock is `clock_ahead` behind; `pauses` are seconds of a
    garbage collection of rank 0 by step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_facts(directory, ranks, hosts, command)
    at = [100.0] * ranks
    writers = [StepRecorder([EventWriter(directory, rank)]) for rank in range(ranks)]
    shifts = [0.0 if rank < (ranks + 1) // 2 or len(hosts) == 1 else -clock_ahead for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        host = hosts[0] if shifts[rank] == 0.0 else hosts[1]
        begin = 100.0 + shifts[rank]
        writer.record(Started(rank, ranks, host, 1, 0, begin, "2026-01-01T00:00:00", f"clock of {host}"))
        if shifts[rank]:
            writer.record(ClockOffset(begin, clock_ahead, 0.0002))
        facts = [BucketFacts(4 << 20, "int8", (f"layers.{9 - b}.weight",)) for b in range(buckets)]
        writer.record(BucketLayout("hierarchical", tuple(facts)))
    for step in range(1, steps + 1):
        _step(writers, at, shifts, step, _Costs(buckets, slow or {}, wire, pauses or {}, phase_names or {}))
    for writer in writers:
        writer.close()
    return directory


class _Costs:
    def __init__(
        self,
        buckets: int,
        slow: Mapping[int, Mapping[str, float]],
        wire: float,
        pauses: Mapping[int, float],
        names: Mapping[int, str],
    ) -> None:
        self.buckets, self.slow, self.wire, self.pauses, self.names = buckets, slow, wire, pauses, names

    def of(self, rank: int, phase: str, step: int) -> float:
        wobble = 1.0 + 0.02 * math.sin(step * 1.7 + rank)
        return PHASES[phase] * wobble * (8 if step == 1 else 1) + self.slow.get(rank, {}).get(phase, 0.0)


def _step(
    writers: Sequence[StepRecorder], at: list[float], shifts: Sequence[float], step: int, costs: _Costs
) -> None:
    ranks = len(writers)
    phases: list[list[Phase]] = []
    for rank in range(ranks):
        own, now = [], at[rank]
        for name in ("data", "forward", "loss", "backward"):
            end = now + costs.of(rank, name, step)
            if name == "forward" and rank == 0 and step in costs.pauses:
                own.append(
                    Phase(
                        costs.names.get(step, "garbage collection"), now + 0.001, now + 0.001 + costs.pauses[step]
                    )
                )
                end += costs.pauses[step]
            own.append(Phase(name, now, end))
            now = end
        phases.append(own)
    ready = [_ready(own[-1], costs.buckets) for own in phases]
    ends: list[float] = []
    for b in range(costs.buckets):
        filled = max(own[b] for own in ready)
        ends.append(max(filled, ends[-1] if ends else 0.0) + costs.wire)
    for rank, writer in enumerate(writers):
        shift, own = shifts[rank], phases[rank]
        data = next(phase for phase in own if phase.name == "data")
        writer.record(DataWait(data.begin_seconds + shift, data.end_seconds + shift, 32))
        for phase in own:
            if phase.name != "data":
                writer.record(Phase(phase.name, phase.begin_seconds + shift, phase.end_seconds + shift))
        begin, end = own[-1].end_seconds, max(ends[-1], own[-1].end_seconds)
        times = []
        for b in range(costs.buckets):
            mine, turn = ready[rank][b], max(ready[rank][b], ends[b - 1] if b else 0.0)
            others = max(0.0, max(r[b] for r in ready) - mine)
            times.append(
                BucketTimes(
                    4 << 20, 1 << 20, mine - 0.002 + shift, mine + shift, mine + shift, turn + shift,
                    ends[b] + shift, others, 0.0006, 6,
                )
            )  # fmt: skip
        if ranks > 1:
            launches = tuple(bucket.launch_seconds for bucket in times)
            writer.record(Exchange(launches, begin + shift, end + shift, costs.buckets << 20, tuple(times)))
        else:
            end = begin
        last = end + costs.of(rank, "optimizer", step)
        writer.record(Phase("optimizer", end + shift, last + shift))
        writer.record(
            Logged(2.0 + 3.0 * math.exp(-step / 150) + 0.05 * math.sin(step * 12.9898 + rank), 4096, None)
        )
        if step % 8 == 0:
            used = 2.1e9 + 4e7 * rank + 1e6 * min(step, 200)
            writer.record(
                Sample(
                    last + shift, 1.0, 0.9 - 0.05 * (rank % 3), 0.6, 8, int(used), 24 * 10**9, 0, 0, 3,
                    int(costs.buckets * 7e6), int(costs.buckets * 7e6),
                )
            )  # fmt: skip
        at[rank] = last
        writer.record(StepDone(step, last + shift))


def _ready(backward: Phase, buckets: int) -> list[float]:
    length = backward.end_seconds - backward.begin_seconds
    return [backward.begin_seconds + length * (b + 1) / buckets for b in range(buckets)]


def write_facts(directory: Path, ranks: int, hosts: Sequence[str], command: list[str] | None) -> None:
    facts: dict[str, Any] = {
        "version": 1,
        "command": command or ["python", "train.py", "--lr", "0.1"],
        "size": ranks,
        "hosts": list(hosts),
        "started": "2026-11-21T08:22:55.034+00:00",
        "versions": {"farandole": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
        "commit": None,
        "cores": 8,
        "plan": {
            "version": 1,
            "bucket_bytes": 4194304,
            "codec": "int8",
            "codec_for": {},
            "timeout_seconds": 600.0,
        },
    }
    (directory / "run.json").write_text(json.dumps(facts))

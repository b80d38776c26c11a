"""Writes the steps that an importer found as a run directory, with the writer of recorded runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...core.vocabulary import run_files
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import BucketTimes, Exchange, Phase, Started, StepDone
from ..record.event_writer import EventWriter
from .foreign_rank import ForeignRank

CLOCK = "imported"
"""All ranks were put on this clock."""
FAR_SECONDS = 3600.0
"""Wall times further apart than this are of different jobs."""


def write_ranks(ranks: Sequence[ForeignRank], out: Path, facts: Mapping[str, Any]) -> list[str]:
    """Write the run; return notes. Ranks are put on one clock by the wall time that their files say.

    Where one does not say it, or they are hours apart, its first step begins when the earliest does.
    """
    notes = [note for rank in ranks for note in rank.notes]
    shifts, together = _shifts(ranks)
    if not together and len(ranks) > 1:
        notes.append(
            "the files do not say when they began, or hours apart: first steps are taken to begin together,"
            " so that waiting for others is a guess"
        )
    size = max([len(ranks), *(rank.rank + 1 for rank in ranks), *(rank.size or 0 for rank in ranks)])
    epoch = min((r.epoch_seconds for r in ranks if r.epoch_seconds is not None), default=0.0)
    wall = datetime.fromtimestamp(epoch, timezone.utc).isoformat(timespec="milliseconds")
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("logs", "crashes"):
            (out / name).mkdir(mode=0o700, exist_ok=True)
        run = {"version": 1, "size": size, "hosts": sorted({r.host for r in ranks}), "started": wall, "plan": {}}
        run_files.write_private(out / run_files.RUN, json.dumps({**run, **facts}, indent=1) + "\n")
        for rank, shift in zip(ranks, shifts, strict=True):
            _write(rank, shift, size, wall, out)
    except OSError as problem:
        raise ConfigError(
            f"cannot write {out}: {problem.strerror or problem}", remedy="choose another place with -o RUN"
        ) from None
    return notes


def _shifts(ranks: Sequence[ForeignRank]) -> tuple[list[float], bool]:
    """Return what to add to each rank's times, and whether wall times gave it. The earliest begin becomes 0."""
    begins = [rank.begin_seconds for rank in ranks]
    epochs = [rank.epoch_seconds for rank in ranks]
    known = [epoch + begin for epoch, begin in zip(epochs, begins, strict=True) if epoch is not None]
    if len(known) == len(ranks) and max(known) - min(known) < FAR_SECONDS:
        first = min(known)
        return [(epoch or 0.0) - first for epoch in epochs], True
    return [-begin for begin in begins], False


def _write(rank: ForeignRank, shift: float, size: int, wall: str, out: Path) -> None:
    writer = EventWriter(out, rank.rank)
    begin = math.floor((rank.begin_seconds + shift) * 1e6) / 1e6
    writer.record(Started(rank.rank, size, rank.host, 0, 0, begin, wall, CLOCK))
    for step in rank.steps:
        for phase in step.phases:
            writer.record(Phase(phase.name, phase.begin_seconds + shift, phase.end_seconds + shift))
        for exchange in step.exchanges:
            writer.record(moved(exchange, shift))
        writer.record(StepDone(step.step, step.end_seconds + shift))
    writer.close()


def moved(exchange: Exchange, shift: float) -> Exchange:
    """Return the exchange `shift` seconds later."""
    return Exchange(
        tuple(at + shift for at in exchange.launch_seconds),
        exchange.wait_begin_seconds + shift,
        exchange.wait_end_seconds + shift,
        exchange.sent_bytes,
        tuple(_moved(bucket, shift) for bucket in exchange.buckets),
    )


def _moved(bucket: BucketTimes, shift: float) -> BucketTimes:
    first, last = bucket.first_ready_seconds, bucket.last_ready_seconds
    return replace(
        bucket,
        first_ready_seconds=None if first is None else first + shift,
        last_ready_seconds=None if last is None else last + shift,
        launch_seconds=bucket.launch_seconds + shift,
        begin_seconds=bucket.begin_seconds + shift,
        end_seconds=bucket.end_seconds + shift,
    )

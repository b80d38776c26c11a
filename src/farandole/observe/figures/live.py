"""A run while it goes on: what each rank does now, from the ends of its files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.vocabulary.errors import DataError
from ...core.vocabulary.run_files import METRICS, RUN
from ...core.vocabulary.units import format_bytes, format_seconds
from ..records.rows import own_waits, step_seconds
from ..records.run_reader import how_it_failed, no_run, read_facts, why_ended
from ..records.timeline_reader import RankTimeline, read_tail
from .step_parts import rows_of

# What a run does now: the state of every rank and the alarms, from the last lines that the ranks have written.

TAIL_BYTES = 128 * 1024
"""Read from the end of a rank's events: some dozens of steps."""
_SILENT_SECONDS = 10.0
_SILENT_STEPS = 20
"""A rank that has written nothing for so long, and for so many of its steps, stands still."""
_FULL_SHARE = 0.05
"""Least share of a machine's memory that should be available."""
_BEHIND = 3
"""Steps; ranks that exchange are never further apart, but for what is not written yet."""


@dataclass(frozen=True)
class RankState:
    """What one rank did in its last steps. None: not known."""

    rank: int
    host: str
    step: int
    total_steps: int | None
    step_seconds: float | None
    """Median of the last steps."""
    phase: str
    """Where most of their time went; empty when it is not known."""
    wait_share: float | None
    """Share of their time that it waited for exchanges."""
    data_share: float | None
    sent_bytes_per_second: float | None
    resident_bytes: int | None
    available_bytes: int | None
    device_bytes: int | None
    loss: float | None
    silent_seconds: float
    """Since it wrote last."""


@dataclass(frozen=True)
class RunState:
    """A run at one moment."""

    name: str
    directory: str
    status: str
    """``starting``, ``running``, or how it is known that it has ended."""
    is_over: bool
    size: int | None
    ranks: tuple[RankState, ...]
    alarms: tuple[str, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each metric of `fd.log`, of those that were written last."""

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def read_state(run_directory: Path, now: float | None = None) -> RunState:
    """Return what the run does now; `now` is in seconds since the epoch.

    Raises `DataError` for a directory that is not there or holds nothing of a run.
    """
    now = time.time() if now is None else now
    if not run_directory.is_dir():
        raise DataError(f"{run_directory} is not a run directory", remedy="name a directory below runs/")
    facts = read_facts(run_directory)
    paths = sorted(run_directory.glob("events-rank*.jsonl"))
    if not paths and not (run_directory / RUN).exists():
        raise no_run(run_directory)
    ranks: list[RankState] = []
    unread: list[str] = []
    for path in paths:
        try:
            tail = read_tail(path, TAIL_BYTES)
        except DataError as problem:
            unread.append(problem.message)
        else:
            ranks += [] if tail is None else [_state_of(tail, path, now)]
    ranks.sort(key=lambda rank: rank.rank)
    ended = why_ended(run_directory, now)
    failed = [line for line in [how_it_failed(run_directory)] if line]
    status = ended or ("running" if any(rank.step for rank in ranks) else "starting")
    size = facts.get("size")
    return RunState(
        run_directory.resolve().name, str(run_directory), status, bool(ended), size or len(ranks) or None,
        tuple(ranks), (*failed, *unread, *_alarms(ranks, is_over=bool(ended))),
        _read_metrics(run_directory),
    )  # fmt: skip


def _state_of(timeline: RankTimeline, path: Path, now: float) -> RankState:
    steps, sample = timeline.steps, timeline.samples[-1] if timeline.samples else None
    lengths = [row.end_seconds - row.begin_seconds for row in steps]
    seconds = sum(lengths)
    parts: Counter[str] = Counter()
    rows = rows_of(timeline)
    for row in rows:
        parts.update(step_seconds(row))
    waits = [own_waits(row) for row in rows]
    last = steps[-1] if steps else None
    thinned = timeline.thinned[-1] if timeline.thinned else None
    known = bool(steps) and seconds > 0
    losses = [row.loss for row in steps if row.loss is not None]
    return RankState(
        rank=timeline.rank,
        host=timeline.host,
        step=max(last.step if last else 0, thinned.last_step if thinned else 0),
        total_steps=next((row.total_steps for row in reversed(steps) if row.total_steps), None),
        step_seconds=statistics.median(lengths) if steps else None,
        phase=parts.most_common(1)[0][0] if known and parts else "",
        wait_share=sum(wait for wait, _ in waits) / seconds if known else None,
        data_share=sum(data for _, data in waits) / seconds if known else None,
        sent_bytes_per_second=sum(row.sent_bytes for row in steps) / seconds if known else None,
        resident_bytes=sample.resident_bytes if sample else None,
        available_bytes=sample.available_bytes if sample else None,
        device_bytes=sample.gpu_used_bytes if sample else None,
        loss=losses[-1] if losses else None,
        silent_seconds=max(0.0, now - path.stat().st_mtime),
    )


def _read_metrics(run_directory: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    try:
        with (run_directory / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return found
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            row = json.loads(line)
            if row["kind"] == "metrics":
                found.update((str(name), float(value)) for name, value in row["values"].items())
    return found


def _alarms(ranks: Sequence[RankState], *, is_over: bool) -> list[str]:
    """Return what needs attention, one line each."""
    alarms = []
    most = max((rank.step for rank in ranks), default=0)
    for rank in ranks:
        if rank.loss is not None and not math.isfinite(rank.loss):
            alarms.append(f"rank {rank.rank}: the loss is {rank.loss}")
        if is_over:
            continue
        patience = max(_SILENT_SECONDS, _SILENT_STEPS * (rank.step_seconds or 0.0))
        if rank.step and rank.silent_seconds > patience:
            alarms.append(f"rank {rank.rank}: no step for {format_seconds(rank.silent_seconds)}")
        elif most - rank.step > _BEHIND and rank.silent_seconds > _SILENT_SECONDS:
            alarms.append(f"rank {rank.rank} is at step {rank.step}, another at {most}")
        total = (rank.available_bytes or 0) + (rank.resident_bytes or 0)
        if rank.available_bytes is not None and rank.available_bytes < _FULL_SHARE * total:
            alarms.append(f"rank {rank.rank}: little memory is available on {rank.host}")
    return alarms


# A run's state as a table for terminals, by rich.

_NARROW = 72
"""Columns; below, host and data are left out."""


def render(state: RunState, width: int) -> RenderableType:
    """Return what is shown on a terminal of so many columns."""
    head = Text(f"{state.name}  ", style="bold")
    head.append(state.status, style="red" if state.is_over and "failed" in state.status else "green")
    if state.size is not None and len(state.ranks) < state.size:
        head.append(f"  {len(state.ranks)} of {state.size} ranks have written")
    parts: list[RenderableType] = [head]
    if state.ranks:
        parts.append(_table(state, width))
    else:
        parts.append(Text("no rank has written yet: a rank first writes after its first steps"))
    if state.metrics:
        parts.append(Text("  ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())))
    parts += [Text(f"! {alarm}", style="bold red") for alarm in state.alarms]
    return Group(*parts)


def _table(state: RunState, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    is_wide = width >= _NARROW
    columns = ["rank", *(["host"] if is_wide else []), "step", "a step", "mostly", "waits"]
    columns += [*(["data"] if is_wide else []), "sends", "memory"]
    for name in columns:
        table.add_column(name, justify="left" if name in ("host", "mostly") else "right", no_wrap=True)
    for rank in state.ranks:
        table.add_row(*_cells(rank, is_wide=is_wide))
    return table


def _cells(rank: RankState, *, is_wide: bool) -> list[Text]:
    step = f"{rank.step}/{rank.total_steps}" if rank.total_steps else str(rank.step)
    memory = rank.device_bytes if rank.device_bytes is not None else rank.resident_bytes
    cells = [str(rank.rank)]
    cells += [rank.host[:16]] if is_wide else []
    cells += [step, "" if rank.step_seconds is None else format_seconds(rank.step_seconds), rank.phase[:12]]
    cells += [_share(rank.wait_share)]
    cells += [_share(rank.data_share)] if is_wide else []
    sent = rank.sent_bytes_per_second
    cells += ["" if sent is None else f"{format_bytes(sent)}/s", "" if memory is None else format_bytes(memory)]
    return [Text(cell) for cell in cells]


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"

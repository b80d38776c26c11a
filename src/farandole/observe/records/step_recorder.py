"""The recorder of one rank: it makes a row of the events of each step, and gives rows and events to those who ask.

[Note: samples of several ranks] Where n ranks train on the same samples, each has counted all of them. A row has
the rank's share: of rank k, from 0 to n - 1, (S + k) // n of the first S samples. These add up to S (Hermite's
identity).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...core.vocabulary.events import (
    BACKWARD,
    DATA,
    EVALUATION,
    EVENTS_VERSION,
    EXCHANGE,
    FORWARD,
    OTHER,
    SETUP_SAME_SAMPLES,
    BucketLayout,
    ClockOffset,
    DataWait,
    DevicePhases,
    Event,
    Exchange,
    InnerExchange,
    Logged,
    Phase,
    PipelineAction,
    Sample,
    Setup,
    Started,
    StepDone,
    Traffic,
)
from ...core.vocabulary.run_files import events_path
from . import rows
from .line_file import BOUND_BYTES, Downsampler, LineFile
from .rows import ExchangeRow, StepRow, ThinnedRow

PHASES_KEPT = 256
"""Phases of a step that are kept one by one; of the rest only the time."""
EXCHANGES_KEPT = 64
INNER_KEPT = 4096
"""Exchanges whose phase has not ended yet that are kept one by one."""


class EventSink(Protocol):
    """What takes the events of a rank."""

    def record(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write what is not written yet."""


class StepSink(EventSink, Protocol):
    """What takes whole steps too."""

    def record_step(self, row: StepRow) -> None:
        """Take a step that is done; its events were taken before, but for `StepDone`."""


class StepRecorder:
    """Gives every event to all sinks, and every step to those that take steps. A `Recorder`."""

    def __init__(self, step_sinks: Sequence[StepSink], sinks: Sequence[EventSink] = ()) -> None:
        """`sinks` take events before `step_sinks` do."""
        self._builder = StepBuilder()
        self._step_sinks = step_sinks
        self._sinks: list[EventSink] = [*sinks, *step_sinks]

    def add(self, sink: EventSink) -> None:
        """Give later events to `sink` too, after the others: it may record more."""
        self._sinks.append(sink)

    def record(self, event: Event) -> None:
        """Take one event."""
        row = self._builder.take(event) if self._step_sinks else None
        if row is not None:
            for each in self._step_sinks:
                each.record_step(row)
        for sink in self._sinks:
            sink.record(event)

    def close(self) -> None:
        """Close them all, the last one first: what it still records reaches those before it."""
        for sink in reversed(self._sinks):
            sink.close()


class EventWriter:
    """Writes one rank's events into the run directory. Format: `docs/notes/records.md`.

    The first line says whose events they are and in which version; each further line is one step or another
    record (`rows`).

    The file stays below about `bound_bytes`: of a long run, rows are left out (`thinning`).
    """

    def __init__(self, run_directory: Path, rank: int, *, bound_bytes: int = BOUND_BYTES) -> None:
        self._lines = LineFile(events_path(run_directory, rank))
        self._thinning = Downsampler(bound_bytes)

    def record(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Started):
            self._lines.write({"version": EVENTS_VERSION, **dataclasses.asdict(event)})
        elif isinstance(event, Sample):
            if self._thinning.takes_sample(self._lines.written_bytes):
                self._lines.write(rows.encode_sample(event))
        elif isinstance(event, Traffic):
            if self._thinning.takes_sample(self._lines.written_bytes):
                self._lines.write(rows.encode_traffic(event))
        elif isinstance(event, Setup):
            self._lines.write(rows.encode_setup(event))
        elif isinstance(event, ClockOffset):
            self._lines.write(rows.encode_clock(event))
        elif isinstance(event, BucketLayout):
            self._write(self._thinning.close())
            self._lines.write(rows.encode_layout(event))
        elif isinstance(event, DevicePhases) and self._thinning.level(self._lines.written_bytes) == 0:
            self._lines.write(rows.encode_device_phases(event))

    def record_step(self, row: StepRow) -> None:
        """Take a step that is done."""
        self._write(self._thinning.take_step(row, self._lines.written_bytes))

    def _write(self, kept: list[StepRow | ThinnedRow]) -> None:
        for row in kept:
            self._lines.write(rows.encode_step(row) if isinstance(row, StepRow) else rows.encode_thinned(row))

    def close(self) -> None:
        """Write the rows that are not written yet."""
        self._write(self._thinning.close())
        self._lines.close()


class StepBuilder:
    """Gathers events until a step is done, then gives its row."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._same = (0, 1)
        self._counted: Counter[str] = Counter()
        """Samples and tokens of the ranks that train on the same. See [Note: samples of several ranks]."""
        self._clear()

    def _clear(self) -> None:
        self._samples = [0]
        """Those that were counted, and each number that the loop told."""
        self._data_cpu: float | None = None
        self._phases: list[Phase] = []
        self._more: dict[str, float] = {}
        self._exchanges: list[ExchangeRow] = []
        self._inner: list[InnerExchange] = []
        self._inner_seconds: defaultdict[str, float] = defaultdict(float)
        self._inner_phases: defaultdict[str, float] = defaultdict(float)
        self._inner_bytes = 0
        self._loss: float | None = None
        self._tokens: int | None = None
        self._total: int | None = None

    def take(self, event: Event) -> StepRow | None:
        """Take an event; return the finished step when it was the last of one.

        A garbage collection may call this while it runs; all it does then is to append a phase.
        """
        if isinstance(event, Phase):
            self._phase(event)
        elif isinstance(event, InnerExchange):
            self._inner.append(event)
            if len(self._inner) > INNER_KEPT:
                self._inner = _summed(self._inner)
        elif isinstance(event, PipelineAction):
            name = FORWARD if event.kind == "F" else BACKWARD
            self._phase(Phase(name, event.begin_seconds, event.end_seconds))
        elif isinstance(event, Exchange):
            self._exchange(event)
        elif isinstance(event, DataWait):
            self._phase(Phase(DATA, event.begin_seconds, event.end_seconds))
            self._samples[0] += event.samples
            if event.cpu_seconds is not None:
                self._data_cpu = (self._data_cpu or 0.0) + event.cpu_seconds
        elif isinstance(event, Logged):
            self._loss = event.loss if event.loss is not None else self._loss
            self._total = event.total_steps if event.total_steps is not None else self._total
            self._samples[0] += event.samples
            self._samples += [] if event.batch_samples is None else [event.batch_samples]
            if event.tokens is not None:
                self._tokens = (self._tokens or 0) + event.tokens
        elif isinstance(event, Started):
            self._begin = event.begin_seconds
        elif isinstance(event, Setup) and SETUP_SAME_SAMPLES in event.values:
            index, _, ranks = str(event.values[SETUP_SAME_SAMPLES]).partition(" ")
            self._same, self._counted = (int(index), int(ranks)), Counter()
        elif isinstance(event, StepDone):
            return self._finish(event)
        return None

    def _phase(self, phase: Phase) -> None:
        while self._inner and self._inner[-1].begin_seconds >= phase.begin_seconds:
            each = self._inner.pop()
            if phase.name != EVALUATION:  # what is exchanged in it is no part of training
                self._add_inner(each, phase.name)
            elif each.degree == "shard":  # but for stepped parameters that arrive there
                self._inner_bytes += each.sent_bytes
        if len(self._phases) < PHASES_KEPT:
            self._phases.append(phase)
        else:
            self._add_more(phase.name, phase.end_seconds - phase.begin_seconds)

    def _exchange(self, event: Exchange) -> None:
        if len(self._exchanges) < EXCHANGES_KEPT:
            self._exchanges.append(
                ExchangeRow(
                    list(event.launch_seconds),
                    event.wait_begin_seconds,
                    event.wait_end_seconds,
                    event.sent_bytes,
                    event.buckets,
                    event.engine,
                )
            )
            return
        last = self._exchanges[-1]
        self._exchanges[-1] = dataclasses.replace(last, sent_bytes=last.sent_bytes + event.sent_bytes)
        self._add_more(EXCHANGE, event.wait_end_seconds - event.wait_begin_seconds)

    def _add_inner(self, each: InnerExchange, phase: str) -> None:
        seconds = each.end_seconds - each.begin_seconds
        self._inner_seconds[each.degree] += seconds
        self._inner_phases[phase] += seconds
        self._inner_bytes += each.sent_bytes

    def _own(self, what: str, count: int) -> int:
        index, ranks = self._same
        before = self._counted[what]
        self._counted[what] += count
        return (before + count + index) // ranks - (before + index) // ranks

    def _add_more(self, name: str, seconds: float) -> None:
        if name not in self._more and len(self._more) >= PHASES_KEPT:
            name = next(iter(self._more))  # a name a call: still no more than so many of them
        self._more[name] = self._more.get(name, 0.0) + seconds

    def _finish(self, event: StepDone) -> StepRow:
        phases, more = tuple(self._phases), self._more
        for each in self._inner:
            self._add_inner(each, OTHER)
        data = sum(phase.end_seconds - phase.begin_seconds for phase in phases if phase.name == DATA)
        row = StepRow(
            event.step,
            self._begin,
            event.end_seconds,
            data + more.get(DATA, 0.0),
            self._own("samples", sum(self._samples[1:]) if self._samples[1:] else self._samples[0]),
            self._exchanges,
            self._loss,
            None if self._tokens is None else self._own("tokens", self._tokens),
            self._total,
            phases,
            more,
            self._data_cpu,
            dict(self._inner_seconds),
            dict(self._inner_phases),
            self._inner_bytes,
        )
        self._begin = event.end_seconds
        self._clear()
        return row


def _summed(exchanges: Sequence[InnerExchange]) -> list[InnerExchange]:
    """Return one exchange for all of each degree: as long as they took together, from when the first began."""
    found: dict[str, InnerExchange] = {}
    for each in exchanges:
        before = found.get(each.degree, dataclasses.replace(each, end_seconds=each.begin_seconds, sent_bytes=0))
        end = before.end_seconds + each.end_seconds - each.begin_seconds
        sent = before.sent_bytes + each.sent_bytes
        found[each.degree] = dataclasses.replace(before, end_seconds=end, sent_bytes=sent)
    return list(found.values())

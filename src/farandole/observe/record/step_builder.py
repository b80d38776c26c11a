"""Makes a row of the events of one step, when the optimizer has stepped. Holds one step, of bounded size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...core.vocabulary.events import (
    BACKWARD,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    DataWait,
    Event,
    Exchange,
    InnerExchange,
    Logged,
    Phase,
    PipelineAction,
    Started,
    StepDone,
)
from ..format.rows import ExchangeRow, StepRow

PHASES_KEPT = 256
"""Phases of a step that are kept one by one; of the rest only the time."""
EXCHANGES_KEPT = 64
INNER_KEPT = 4096
"""Exchanges of activations of a step that may turn out to be an evaluation's; older ones count as the step's."""


class StepBuilder:
    """Gathers events until a step is done, then gives its row."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._clear()

    def _clear(self) -> None:
        self._samples = 0
        self._data_cpu: float | None = None
        self._phases: list[Phase] = []
        self._more: dict[str, float] = {}
        self._exchanges: list[ExchangeRow] = []
        self._inner: list[InnerExchange] = []
        self._inner_seconds: dict[str, float] = {}
        self._loss: float | None = None
        self._tokens: int | None = None
        self._total: int | None = None

    def take(self, event: Event) -> StepRow | None:
        """Take an event; return the finished step when it was the last of one.

        A garbage collection may call this while it runs; all it does then is to append a phase.
        """
        if isinstance(event, Phase):
            self._phase(event)
            if event.name == EVALUATION:  # what is exchanged in it is no part of training
                while self._inner and self._inner[-1].begin_seconds >= event.begin_seconds:
                    self._inner.pop()
        elif isinstance(event, InnerExchange):
            self._inner.append(event)
            if len(self._inner) > INNER_KEPT:
                self._add_inner(self._inner[: INNER_KEPT // 2])
                del self._inner[: INNER_KEPT // 2]
        elif isinstance(event, PipelineAction):
            name = FORWARD if event.kind == "F" else BACKWARD
            self._phase(Phase(name, event.begin_seconds, event.end_seconds))
        elif isinstance(event, Exchange):
            self._exchange(event)
        elif isinstance(event, DataWait):
            self._phase(Phase(DATA, event.begin_seconds, event.end_seconds))
            self._samples += event.samples
            if event.cpu_seconds is not None:
                self._data_cpu = (self._data_cpu or 0.0) + event.cpu_seconds
        elif isinstance(event, Logged):
            self._loss = event.loss if event.loss is not None else self._loss
            self._total = event.total_steps if event.total_steps is not None else self._total
            self._samples += event.samples
            if event.tokens is not None:
                self._tokens = (self._tokens or 0) + event.tokens
        elif isinstance(event, Started):
            self._begin = event.begin_seconds
        elif isinstance(event, StepDone):
            return self._finish(event)
        return None

    def _phase(self, phase: Phase) -> None:
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

    def _add_inner(self, exchanges: Sequence[InnerExchange]) -> None:
        for each in exchanges:
            seconds = self._inner_seconds.get(each.degree, 0.0)
            self._inner_seconds[each.degree] = seconds + each.end_seconds - each.begin_seconds

    def _add_more(self, name: str, seconds: float) -> None:
        if name not in self._more and len(self._more) >= PHASES_KEPT:
            name = next(iter(self._more))  # a name a call: still no more than so many of them
        self._more[name] = self._more.get(name, 0.0) + seconds

    def _finish(self, event: StepDone) -> StepRow:
        phases, more = tuple(self._phases), self._more
        self._add_inner(self._inner)
        data = sum(phase.end_seconds - phase.begin_seconds for phase in phases if phase.name == DATA)
        row = StepRow(
            event.step,
            self._begin,
            event.end_seconds,
            data + more.get(DATA, 0.0),
            self._samples,
            self._exchanges,
            self._loss,
            self._tokens,
            self._total,
            phases,
            more,
            self._data_cpu,
            self._inner_seconds,
        )
        self._begin = event.end_seconds
        self._clear()
        return row

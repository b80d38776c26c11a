"""Phases of one call of Keras's train function, from marks and exchanges: as events, without a state.

[Note: what is told apart] With marks, of a batch: waiting for data from the begin of its graph (or the call of
the train function, where no mark tells it) until the batch is there, forward until the loss is known, backward
until the last gradients have left, the wait for the exchange, and from then until the end of the batch the
optimizer, with what else Keras does there (metrics). Where a mark is missing, what it would part is `UNDIVIDED`
(with the wait for data) or `COMPUTING` (without). A call that makes a graph takes long before it asks for the
batch: without the mark of its begin, the wait for data is not known.

[Note: several steps of a call] With ``steps_per_execution`` nothing tells when the optimizer of one step was done
and the wait for the next batch began. A batch that was there before the exchange of the step before was over was
not waited for. Otherwise the time from then until the batch was there is `UNDIVIDED`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.vocabulary import events
from ...core.vocabulary.events import BucketFacts, DataWait, Event, Exchange, Logged, Phase


class Finished(NamedTuple):
    """A round of exchanges that is complete."""

    name: str
    facts: tuple[BucketFacts, ...]
    exchange: Exchange


class Mark(NamedTuple):
    """What a batch told of itself on its way."""

    batch_seconds: float | None
    """When the batch was there. None: not known."""
    loss_seconds: float | None
    """When its loss was known. None: not known."""
    samples: int = 0
    """Rows of the batch; 0: not known."""
    asked_seconds: float | None = None
    """When its graph began, and asked for it. None: not known."""


_NO_MARK = Mark(None, None)


@dataclass
class OpenBatch:
    """One call of Keras's train function."""

    begin_seconds: float
    first: int
    """The number of its first step in the epoch."""
    finished: list[Finished] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    asked_seconds: float | None = None
    """When the train function was called, after the callbacks of the batch's begin."""
    has_traced: bool = False
    """Whether a graph was made in it."""
    optimizer_seconds: float | None = None
    """When the optimizer was done, where that is known."""

    def loss_is_known(self, at_seconds: float, *, had_batch: bool) -> None:
        """Note a loss outside graphs. `had_batch`: whether the data were there when the batch began."""
        if self.marks and self.marks[-1].loss_seconds is None:
            self.marks[-1] = self.marks[-1]._replace(loss_seconds=at_seconds)
        else:
            self.marks.append(Mark(self.begin_seconds if had_batch else None, at_seconds))

    def add_marks(self, found: list[Mark]) -> None:
        """Add what graphs have told."""
        self.marks += found
        if self.has_traced:
            self.marks = [
                mark._replace(batch_seconds=None) if mark.asked_seconds is None else mark for mark in self.marks
            ]


def before_exchange(batch: OpenBatch, begin: float, until: float, mark: Mark | None) -> Iterator[Event]:
    """Yield what one step of a batch does until its exchange. See [Note: several steps of a call].

    Args:
        batch: the call.
        begin: when the exchange of the step before was over; of the first step, when the batch began.
        until: when the last gradients have left.
        mark: of this step; None: there is none.
    """
    is_first = begin == batch.begin_seconds
    mark = mark or _NO_MARK
    there, known = mark.batch_seconds, mark.loss_seconds
    has_waited = is_first or there is None or there > begin
    there = there if has_waited else begin
    if not _is_ordered(begin, there, known, until):
        there = known = None  # a mark of something else
    if there is None:
        yield Logged(samples=mark.samples)
        yield from phase(events.UNDIVIDED, begin, until if known is None else known)
    elif is_first:
        yield from _waited(batch, mark, there, mark.samples)
    else:
        yield from phase(events.UNDIVIDED, begin, there)
        yield DataWait(there, there, mark.samples)
    if there is not None:  # where it was not waited for, the optimizer of the step before is in it
        name = events.FORWARD if has_waited and known is not None else events.COMPUTING
        yield from phase(name, there, until if known is None else known)
    if known is not None:
        yield from phase(events.BACKWARD, known, until)


def without_exchange(batch: OpenBatch, end: float) -> Iterator[Event]:
    """Yield what a call did in which nothing was exchanged: a pass of several, or a step of one rank."""
    begin, told = batch.begin_seconds, batch.marks
    first = told[0] if told else _NO_MARK
    there, known = first.batch_seconds, first.loss_seconds
    if not _is_ordered(begin, there, known, end):
        there = known = None
    yield Logged(samples=sum(mark.samples for mark in told))
    if there is None:
        yield from phase(events.UNDIVIDED, begin, end if known is None else known)
    else:
        yield from _waited(batch, first, there, 0)
        yield from phase(events.FORWARD, there, there if known is None else known)
    since = next((each for each in (known, there) if each is not None), end)
    name = events.UNDIVIDED if _wait_inside(told) else events.COMPUTING
    yield from phase(name, since, batch.optimizer_seconds or end)


def phase(name: str, begin: float, end: float) -> Iterator[Event]:
    """Yield a phase, if it has a length."""
    if end > begin:
        yield Phase(name, begin, end)


def _is_ordered(begin: float, there: float | None, known: float | None, until: float) -> bool:
    times = [begin, *(each for each in (there, known) if each is not None), until]
    return times == sorted(times)


def _waited(batch: OpenBatch, mark: Mark, there: float, samples: int) -> Iterator[Event]:
    called = batch.asked_seconds or batch.begin_seconds
    asked = min(max(called, mark.asked_seconds or called), there)
    if there > asked or samples:
        yield DataWait(asked, there, samples)


def _wait_inside(told: list[Mark]) -> bool:
    """Return whether a later batch of a call may have been waited for: the loss before it was known earlier."""
    return any(
        later.batch_seconds is None or before.loss_seconds is None or later.batch_seconds > before.loss_seconds
        for before, later in itertools.pairwise(told)
    )

"""Steps of a training whose loop is not torch's: what is known of them, as events of the session's recorder.

Three sources tell: the exchanges of gradients (`rounds`), the callbacks of Keras (`batch_begins` and so on), and
marks: the times at which a batch was there and its loss was known.

[Note: a step] With our callbacks in `fit` a step is a batch in which gradients were exchanged (each of the steps
of ``steps_per_execution``, each last pass of ``backward_passes_per_step``), and on one rank, where nothing is
exchanged, every batch. Without callbacks a step is a round of exchanges and all before it: a loop of the
script's own, of which no more is known.

[Note: a watch does not raise] Whatever fails in here is said once, and recording of steps ends.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...comm.world.world import World
from ...core.vocabulary import events
from ...core.vocabulary.codec_spec import AUTO, NONE
from ...core.vocabulary.events import (
    BucketFacts,
    BucketLayout,
    BucketTimes,
    DataWait,
    Event,
    Exchange,
    Logged,
    Phase,
)
from ...core.vocabulary.text import write_notice
from ...parallel.instrument.training_facts import TrainingFacts, facts_of
from ...train.data.loader_watch import pause_loaders, watch_loaders
from ...train.stall_watcher import open_phases
from ..common.running import find_running
from ..named_ops.operations import Ticket, Travel

_MOST_ROUNDS = 4096
"""Rounds of one batch: a batch with more was never ended, by an error in it."""
_BETWEEN = "between trainings"


class StepWatch:
    """Records the steps of one world, which keeps it. Called by any thread."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._lock = threading.RLock()
        self.is_recorded = here.session.kept(TrainingFacts) is not None
        """Whether there is a run directory: else steps are counted, and no more."""
        self.expects_exchanges = False
        """Whether gradients meet other ranks': a batch without an exchange is then part of a step."""
        self._batch: OpenBatch | None = None
        self._since_seconds = time.monotonic()
        """When the last step ended."""
        self._leader = ""
        """Whose rounds end steps, where no callback does."""
        self._seen: set[str] = set()
        self._layouts: dict[str, tuple[BucketFacts, ...]] = {}
        self._pauses: dict[str, float] = {}
        """Open pauses by name, and when they began."""
        self._total: int | None = None
        here.session.steps.register(self)

    def note_front_end(self, front_end: str) -> None:
        """Record whose loop trains, unless a loop of Keras does so already."""
        facts = facts_of(self._here)
        if not str(facts.known(events.SETUP_FRONT_END)).startswith("keras"):
            facts.note({events.SETUP_FRONT_END: front_end})

    # -- exchanges -----------------------------------------------------------------------------

    def expect_exchanges(self) -> None:
        """Gradients are about to meet those of other ranks."""
        self.expects_exchanges = True

    def exchanged(self, finished: Finished) -> None:
        """A round of exchanges is complete."""
        with self._lock:
            self.expects_exchanges = True
            batch = self._batch
            if batch is not None and len(batch.finished) < _MOST_ROUNDS:
                batch.finished.append(finished)
                return
            self._batch = None
            self._close_pause(_BETWEEN)
            self._record_exchange(finished)
            if not self._leader or finished.name in self._seen:
                self._leader = finished.name
            self._seen.add(finished.name)
            if finished.name == self._leader:
                self._phase(events.UNDIVIDED, self._since_seconds, finished.exchange.wait_begin_seconds)
                self._step_ends(finished.exchange.wait_end_seconds)

    def _record_exchange(self, finished: Finished) -> None:
        record = self._here.session.recorder.record
        if self._layouts.get(finished.name) != finished.facts:
            self._layouts[finished.name] = finished.facts
            record(BucketLayout("flat", finished.facts))
        record(finished.exchange)

    # -- the callbacks of Keras ----------------------------------------------------------------

    def train_begins(self) -> None:
        """A `fit` begins."""
        with self._lock:
            self._batch = None
            for name in list(self._pauses):
                self._close_pause(name)
            marks.take()

    def watch_loaders(self) -> None:
        """Record the wait for torch's loaders too."""
        watch_loaders(self._here)

    def epoch_begins(self, epoch: int, steps: int | None, epochs: int | None) -> None:
        """An epoch of so many steps begins; None: not known."""
        with self._lock:
            self._close_pause(events.END_OF_EPOCH)
            if steps and epochs and epochs > epoch:
                self._total = self._here.session.steps.done + steps * (epochs - epoch)
            else:
                self._total = None

    def batch_begins(self, first: int) -> None:
        """Keras's train function is about to be called; `first`: the number of its first step in the epoch."""
        with self._lock:
            # Another one is open where the data came to their end: it has no end.
            if self._batch is None or self._batch.first != first:
                self._close_pause(events.END_OF_EPOCH)
                self._batch = OpenBatch(time.monotonic(), first)

    def batch_is_asked(self) -> None:
        """The train function is called."""
        with self._lock:
            if self._batch is not None and self._batch.asked_seconds is None:
                self._batch.asked_seconds = time.monotonic()

    def traces(self) -> None:
        """The train function makes a graph."""
        with self._lock:
            if self._batch is not None:
                self._batch.has_traced = True

    def batch_is_there(self, rows: int) -> None:
        """Outside graphs: the batch is there."""
        with self._lock:
            if self._batch is not None:
                self._batch.marks.append(Mark(time.monotonic(), None, rows))

    def batch_ends(self, last: int, loss: float | None) -> None:
        """Keras's train function has returned; `last`: the number of its last step."""
        end = time.monotonic()
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is None:
                return
            batch.add_marks(marks.take())
            if not batch.finished and self.expects_exchanges:
                self._record(without_exchange(batch, end))
                return
            self._here.session.recorder.record(Logged(loss, total_steps=self._total))
            if batch.finished:
                self._with_exchanges(batch, end, max(1, last - batch.first + 1))
            else:
                self._record(without_exchange(batch, end))
                self._step_ends(end)

    def evaluation_begins(self) -> None:
        """An evaluation begins: of the `fit`, or after it."""
        with self._lock:
            pause_loaders(self._here, is_paused=True)
            self._open_pause(events.EVALUATION)

    def evaluation_ends(self) -> None:
        """It is over."""
        with self._lock:
            pause_loaders(self._here, is_paused=False)
            self._close_pause(events.EVALUATION)

    def epoch_ends(self) -> None:
        """The callbacks of an epoch's end begin."""
        with self._lock:
            self._open_pause(events.END_OF_EPOCH)

    def train_ends(self) -> None:
        """A `fit` is over."""
        with self._lock:
            self._close_pause(events.END_OF_EPOCH)
            self._batch = None
            self._open_pause(_BETWEEN)

    def loss_is_known(self, *, had_batch: bool) -> None:
        """Outside graphs: the loss was computed. `had_batch`: whether the data were there when the batch began."""
        with self._lock:
            batch = self._batch
            if batch is not None:
                batch.loss_is_known(time.monotonic(), had_batch=had_batch)

    def optimizer_is_done(self) -> None:
        """Outside graphs: the optimizer has stepped."""
        with self._lock:
            if self._batch is not None:
                self._batch.optimizer_seconds = time.monotonic()

    # -- phases --------------------------------------------------------------------------------

    def _with_exchanges(self, batch: OpenBatch, end: float, steps: int) -> None:
        """Record the steps of a call, with equal numbers of rounds; fewer than `steps` where the data ended."""
        rounds = len(batch.finished)
        steps = next((count for count in (steps, len(batch.marks)) if count and rounds % count == 0), 1)
        told: Sequence[Mark | None] = batch.marks if len(batch.marks) == steps else [None] * steps
        begin = batch.begin_seconds
        for number in range(steps):
            own = batch.finished[number * rounds // steps : (number + 1) * rounds // steps]
            first, last = own[0].exchange, own[-1].exchange
            self._record(before_exchange(batch, begin, first.wait_begin_seconds, told[number]))
            for one, other in itertools.pairwise(own):
                self._phase(events.COMPUTING, one.exchange.wait_end_seconds, other.exchange.wait_begin_seconds)
            for finished in own:
                self._record_exchange(finished)
            begin = last.wait_end_seconds
            if number == steps - 1:
                done = batch.optimizer_seconds or end
                self._phase(events.OPTIMIZER, begin, done)
                begin = end
            self._step_ends(begin)

    def _phase(self, name: str, begin: float, end: float) -> None:
        self._record(phase(name, begin, end))

    def _record(self, found: Iterable[Event]) -> None:
        for event in found:
            self._here.session.recorder.record(event)

    def _step_ends(self, at_seconds: float) -> None:
        self._seen.clear()
        self._since_seconds = at_seconds
        self._here.session.step_ends(self, at_seconds)

    # -- pauses: no step is expected meanwhile -------------------------------------------------

    def _open_pause(self, name: str) -> None:
        if name not in self._pauses:
            self._pauses[name] = time.monotonic()
            open_phases(self._here).append(name)

    def _close_pause(self, name: str) -> None:
        begin = self._pauses.pop(name, None)
        if begin is None:
            return
        opened = open_phases(self._here)
        if name in opened:
            opened.remove(name)
        if name != _BETWEEN:
            self._phase(name, begin, time.monotonic())


def step_watch(front_end: str = "") -> StepWatch | None:
    """Return the watch of the running world, made at the first call; None without one. See `note_front_end`."""
    running = find_running()
    if running is None or running.world.in_forked_child:
        return None
    here = running.world
    watch = here.session.keep(StepWatch, lambda: StepWatch(here))
    if front_end:
        watch.note_front_end(front_end)
    return watch


class MarkSource:
    """Where the marks of this process's graphs come from."""

    def __init__(self) -> None:
        self.take: Callable[[], list[Mark]] = list
        """Returns the marks since the last call: set by who marks graphs."""


marks = MarkSource()


class _Quiet:
    """Whether something has failed in this process. See [Note: a watch does not raise]."""

    def __init__(self) -> None:
        self.has_failed = False


_quiet = _Quiet()


def quietly(step: Callable[[], object]) -> None:
    """Make a step of recording. See [Note: a watch does not raise]."""
    if _quiet.has_failed:
        return
    try:
        step()
    except Exception as problem:  # of whatever a training hands in
        _quiet.has_failed = True
        write_notice(f"warning: steps are recorded no more: {type(problem).__name__}: {problem}")


def tell(step: Callable[[StepWatch], object], front_end: str = "") -> None:
    """Let `step` tell the watch of the running world, if there is one, of something."""

    def told() -> None:
        watch = step_watch(front_end)
        if watch is not None:
            step(watch)

    quietly(told)


# One exchange of all gradients of an optimizer or a tape, for the records: when each bucket left and was back.
#
# [Note: a round] Gradients of one step travel in several operations, which the engine completes one by one. They
# are one round, and one exchange of the records, once all of them are back. Its wait begins when the last bucket
# has left: then this rank has computed all gradients. Operations that are waited for where they are called
# (outside graphs, and without the kernel in C++) leave one after the other; of those only the whole is known, as
# one bucket, and all of its time is a wait.


class RoundPart(NamedTuple):
    """One operation of a round."""

    round: Round
    place: int

    def submitted(self) -> None:
        """It is handed to the engine now."""
        self.round.submitted(self.place, time.monotonic())

    def arrived(self, ticket: Ticket) -> None:
        """Its result is there; to be called before those who wait for it go on."""
        quietly(lambda: self.round.arrived(self.place, ticket.travel()))


class Round:
    """What is known of one round, each time that it takes place. See [Note: a round]."""

    def __init__(self, name: str, *, one_by_one: bool, front_end: str) -> None:
        """`name`: of the optimizer or tape; `one_by_one`: whether operations are waited for where they are called.

        `front_end`: one of `events.FRONT_ENDS`.
        """
        self.name = name
        self._one_by_one = one_by_one
        self._front_end = front_end
        self._facts: list[BucketFacts] = []
        self._is_complete = False
        self._launches: dict[int, float] = {}
        self._travels: dict[int, Travel] = {}

    def add(self, nbytes: int, codec: str, parameters: tuple[str, ...]) -> RoundPart:
        """Add an operation: bytes of its gradients (0 of sparse ones), how it travels, and whose they are."""
        self._facts.append(BucketFacts(nbytes, codec, parameters))
        return RoundPart(self, len(self._facts) - 1)

    def all_added(self) -> None:
        """Say that no more is added. Outside graphs the operations have taken place already."""
        self._is_complete = True
        if self._facts:
            quietly(self._begin)

    def submitted(self, place: int, at_seconds: float) -> None:
        """Operation `place` is handed to the engine."""
        if place in self._launches:  # the round before was never complete: an operation of it has failed
            self._launches, self._travels = {}, {}
        self._launches[place] = at_seconds

    def arrived(self, place: int, travel: Travel) -> None:
        """Operation `place` is back."""
        if place not in self._launches:
            return
        self._travels[place] = travel
        self._finish()

    def _begin(self) -> None:
        # A batch is a step only with an exchange, from now on.
        tell(lambda watch: watch.expect_exchanges(), self._front_end)
        self._finish()

    def _finish(self) -> None:
        if not self._is_complete or len(self._travels) < len(self._facts):
            return
        launches, travels = self._launches, self._travels
        self._launches, self._travels = {}, {}
        facts = [_as_travelled(self._facts[place], travels[place]) for place in range(len(self._facts))]
        if self._one_by_one:
            times = _together(facts, launches, travels)
            wait_begin = times[0].launch_seconds
            facts = [_merged(facts)]
        else:
            times = [_times(facts[place], launches[place], travels[place]) for place in range(len(facts))]
            wait_begin = max(launches.values())
        end = max(each.end_seconds for each in times)
        exchange = Exchange(
            tuple(each.launch_seconds for each in times),
            min(wait_begin, end),
            end,
            sum(each.sent_bytes for each in times),
            tuple(times),
        )
        finished = Finished(self.name, tuple(facts), exchange)
        tell(lambda watch: watch.exchanged(finished), self._front_end)


def _as_travelled(facts: BucketFacts, travel: Travel) -> BucketFacts:
    """Return the facts with the codec that the engine chose."""
    return replace(facts, codec=travel.codec or NONE) if facts.codec == AUTO else facts


def _times(facts: BucketFacts, launch: float, travel: Travel) -> BucketTimes:
    begin = max(launch, travel.begin_seconds)
    return BucketTimes(
        facts.nbytes,
        travel.sent_bytes,
        None,  # no more is known than that all of its gradients were ready when it left
        launch,
        launch,
        min(begin, travel.end_seconds),
        travel.end_seconds,
        travel.wait_seconds,
        travel.codec_seconds,
        travel.rounds,
    )


def _together(
    facts: list[BucketFacts], launches: dict[int, float], travels: dict[int, Travel]
) -> list[BucketTimes]:
    """Return the round as one bucket."""
    launch = min(launches.values())
    sums = [sum(values) for values in zip(*((t.sent_bytes, t.wait_seconds, t.codec_seconds, t.rounds)
                                            for t in travels.values()), strict=True)]  # fmt: skip
    begin = max(launch, min(travel.begin_seconds for travel in travels.values()))
    end = max(travel.end_seconds for travel in travels.values())
    return [
        BucketTimes(
            sum(each.nbytes for each in facts), int(sums[0]), None, launch, launch, begin, end, sums[1], sums[2],
            int(sums[3]),
        )
    ]  # fmt: skip


def _merged(facts: list[BucketFacts]) -> BucketFacts:
    codecs = {each.codec for each in facts if each.nbytes}
    parameters = tuple(name for each in facts for name in each.parameters)
    return BucketFacts(sum(each.nbytes for each in facts), min(codecs, default="none"), parameters)


# Phases of one call of Keras's train function, from marks and exchanges: as events, without a state.
#
# [Note: what is told apart] With marks, of a batch: waiting for data from the begin of its graph (or the call of
# the train function, where no mark tells it) until the batch is there, forward until the loss is known, backward
# until the last gradients have left, the wait for the exchange, and from then until the end of the batch the
# optimizer, with what else Keras does there (metrics). Where a mark is missing, what it would part is `UNDIVIDED`
# (with the wait for data) or `COMPUTING` (without). A call that makes a graph takes long before it asks for the
# batch: without the mark of its begin, the wait for data is not known.
#
# [Note: several steps of a call] With ``steps_per_execution`` nothing tells when the optimizer of one step was
# done and the wait for the next batch began. A batch that was there before the exchange of the step before was
# over was not waited for. Otherwise the time from then until the batch was there is `UNDIVIDED`.


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

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
from collections.abc import Callable, Iterable, Sequence

from ...comm.world.world import World
from ...core.vocabulary import events
from ...core.vocabulary.events import BucketFacts, BucketLayout, Event, Logged
from ...core.vocabulary.text import write_notice
from ...parallel.instrument.training_facts import TrainingFacts, facts_of
from ...train.data.loader_watch import pause_loaders, watch_loaders
from ...train.stall.watcher import open_phases
from ..common.running import find_running
from .batch_phases import Finished, Mark, OpenBatch, before_exchange, phase, without_exchange

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

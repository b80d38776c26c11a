"""Batches in proportion to the speed of a rank: the plan's `balance`.

[Note: compute without waiting] A rank that waits for the others looks slow if its waiting counts. So a step's
computing is all of it but what is known to be something else: waiting for data (a slow loader is no slow rank),
for gradients and other exchanges, evaluation and checkpoints. Times are of the host: on accelerators they say
when work was queued.

[Note: when shares change] Every rank takes the same decisions from the same numbers. A large gain is taken at
once, a small one after several windows of steps have shown it, so that chance moves nothing. The step must become
shorter as a whole: where the network is the limit, it does not. Whether it did is looked at afterwards, and if
less than half of what was predicted has come, the old shares return for a while.

[Note: where shares change] A loader draws ahead of the training: for its workers, or for a loop that prefetches.
What was drawn was cut by the shares of then. So new shares begin at the first sample that no rank has drawn: ranks
tell each other how far they are, and nothing more is drawn meanwhile, by any thread. The order of the samples is
one for all ranks, and only where it is cut between them changes: every sample is still used once.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..comm.world.comm_errors import translated
from ..comm.world.session import NEVER
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.step_model import divide_samples, longest_seconds
from ..core.vocabulary.degrees import SPEED
from ..core.vocabulary.events import (
    CHECKPOINT,
    END_OF_EPOCH,
    EVALUATION,
    SETUP_SHARES,
    DataWait,
    Event,
    Exchange,
    InnerExchange,
    Phase,
    Recorder,
    Setup,
    StepDone,
)
from ..core.vocabulary.text import write_notice
from ..parallel.data.balance import BalanceKeys, balance_of, is_balance_known

# How long this rank computes for one sample, by the events that it records anyway.

_PAUSES = (EVALUATION, CHECKPOINT, END_OF_EPOCH)


class ComputeTimes(NamedTuple):
    """Medians of a window of steps, in seconds; all 0 where steps have no samples of a known number."""

    sample_seconds: float
    compute_seconds: float
    step_seconds: float
    samples: float


class ComputeMeter:
    """A recorder that measures, and passes every event on. See [Note: compute without waiting]."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begin_seconds: float | None = None
        self._end_seconds = 0.0
        self._other_seconds = 0.0
        self._samples = 0
        self._steps: list[tuple[float, float, int]] = []
        """Computing, length and samples of each step."""

    def record(self, event: Event) -> None:
        """Take one event."""
        self._recorder.record(event)
        if isinstance(event, Exchange):
            self._other_seconds += event.wait_end_seconds - event.wait_begin_seconds
        elif isinstance(event, DataWait):
            self._samples += event.samples
            self._other_seconds += event.end_seconds - event.begin_seconds
        elif isinstance(event, InnerExchange) or (isinstance(event, Phase) and event.name in _PAUSES):
            self._other_seconds += event.end_seconds - event.begin_seconds
        elif isinstance(event, StepDone):
            self._end_seconds = event.end_seconds

    def step_ends(self) -> None:
        """Close a step: `StepDone` was recorded. What happens until `step_begins` is in no step."""
        if self._begin_seconds is not None:
            length = self._end_seconds - self._begin_seconds
            self._steps.append((length - self._other_seconds, length, self._samples))

    def step_begins(self) -> None:
        """Begin the next step."""
        self._begin_seconds = time.monotonic()
        self._other_seconds, self._samples = 0.0, 0

    def take(self) -> ComputeTimes:
        """Return what was measured since the last call."""
        steps, self._steps = [each for each in self._steps if each[2] > 0 and each[0] > 0], []
        if not steps:
            return ComputeTimes(0.0, 0.0, 0.0, 0.0)
        per_sample = statistics.median(compute / samples for compute, _, samples in steps)
        compute, length = (statistics.median(each[i] for each in steps) for i in (0, 1))
        return ComputeTimes(per_sample, compute, length, statistics.median_low(each[2] for each in steps))


# When the shares of ranks change, and to what: a pure function of what all ranks measured.

SURE_GAIN = 1.3
"""Taken after one window."""
LEAST_GAIN = 1.05
"""Taken after `SHOWN_WINDOWS` of them in succession."""
SHOWN_WINDOWS = 3
NEW_WEIGHT = 0.3
"""Weight of a window in the running mean."""
REST_WINDOWS = 1
"""Once a change is in force, until the ranks measure again: its first steps are cold."""
MOST_AHEAD_WINDOWS = 20
"""Until a change is taken to be in force: a loop may use more than one loader, and samples then tell nothing."""
LONG_REST_WINDOWS = 10
"""After a change that did not hold what it promised."""


@dataclass(frozen=True)
class Window:
    """What the ranks measured in some steps."""

    sample_seconds: tuple[float, ...]
    """By rank, its computing for one sample; medians, as all here."""
    step_seconds: float
    compute_seconds: float
    """Computing of the slowest rank in a step."""
    whole: int
    """Samples of a batch of all ranks."""
    samples: tuple[int, ...]
    """By rank, in a step; of several batches where gradients are accumulated."""

    def follows(self, division: Division) -> bool:
        """Return whether the steps were divided so: batches may have been drawn long before."""
        passes = max(1, round(sum(self.samples) / self.whole))
        return tuple(passes * each for each in division.counts(self.whole)) == self.samples


@dataclass(frozen=True)
class Decision:
    """New shares."""

    division: Division
    gain: float
    """How many times as fast steps should be; 1.0 where old shares return."""
    returns: bool = False
    """Whether these are the old ones, as the last change did not hold what it promised."""


@dataclass(frozen=True)
class _Trial:
    """A change whose effect is still to be seen."""

    before: Division
    step_seconds: float
    gain: float


class ShareDecision:
    """The decisions of one training. See [Note: when shares change]."""

    def __init__(self, division: Division) -> None:
        """`division`: the shares at the beginning."""
        self.division = division
        self._mean: tuple[float, ...] | None = None
        self._shown = 0
        self._rest = 0
        self._ahead = 0
        """Windows in which batches may still be of before the last change."""
        self._trial: _Trial | None = None

    def take(self, window: Window) -> Decision | None:
        """Return the new shares, if they are to change now."""
        if self._ahead and not window.follows(self.division):
            self._ahead -= 1
            return None
        self._ahead = 0
        if self._rest:
            self._rest -= 1
            return None
        trial, self._trial = self._trial, None
        if trial is not None and trial.step_seconds / window.step_seconds < 1 + (trial.gain - 1) / 2:
            self._change_to(trial.before, LONG_REST_WINDOWS)
            return Decision(trial.before, 1.0, returns=True)
        now = window.sample_seconds
        self._mean = now if self._mean is None else tuple(
            (1 - NEW_WEIGHT) * old + NEW_WEIGHT * new for old, new in zip(self._mean, now, strict=True)
        )  # fmt: skip
        division, gain = self._proposed(window, now)
        if gain < SURE_GAIN:
            division, gain = self._proposed(window, self._mean)
            self._shown = self._shown + 1 if gain >= LEAST_GAIN else 0
            if self._shown < SHOWN_WINDOWS:
                return None
        self._trial = _Trial(self.division, window.step_seconds, gain)
        self._change_to(division, REST_WINDOWS)
        return Decision(division, gain)

    def _change_to(self, division: Division, rest: int) -> None:
        self.division, self._mean, self._shown, self._rest = division, None, 0, rest
        self._ahead = MOST_AHEAD_WINDOWS

    def _proposed(self, window: Window, sample_seconds: tuple[float, ...]) -> tuple[Division, float]:
        """Return the best shares for these times, and how many times as fast steps are with them."""
        best = Division(tuple(1 / each for each in sample_seconds), self.division.cap)
        now, then = (longest_seconds(each.counts(window.whole), best.speeds) for each in (self.division, best))
        saved = window.compute_seconds * (1 - then / now)
        return best, window.step_seconds / max(window.step_seconds - saved, 1e-3 * window.step_seconds)


# From which batch on one loader divides its batches in which proportion.


@dataclass(frozen=True)
class Division:
    """A proportion in which ranks share batches."""

    speeds: tuple[float, ...]
    """Samples a second of each rank, in any unit."""
    cap: int = 0
    """The most samples of a rank; 0: no limit."""

    def counts(self, count: int) -> tuple[int, ...]:
        """Return each rank's samples of a batch of `count`."""
        return divide_samples(count, self.speeds, self.cap)


class ShareChange(NamedTuple):
    """From this sample of this iteration on, a loader divides so."""

    iteration: int
    used: int
    """Samples of the job's order before it."""
    division: Division


class ShareChanges:
    """The changes of one loader. Threads may draw while the one that trains changes the shares."""

    def __init__(self, division: Division | None) -> None:
        """`division`: from the beginning; None: equal."""
        self.iteration = 0
        """That which began last, from 1."""
        self._changes = [] if division is None else [ShareChange(0, 0, division)]
        self._drawn = (0, 0)
        """The iteration that drew last, and how far in the job's order."""
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Begin an iteration; return its number."""
        with self._lock:
            self.iteration += 1
            return self.iteration

    def at(self, iteration: int, used: int) -> Division | None:
        """Return how the batch is divided that begins after `used` samples; None: equally."""
        found = None
        for change in self._changes:
            if (change.iteration, change.used) <= (iteration, used):
                found = change.division
        return found

    def draw(self, iteration: int, used: int, end: int) -> Division | None:
        """The same, of a batch that is now drawn, up to `end`: what is drawn does not change any more."""
        with self._lock:
            self._drawn = max(self._drawn, (iteration, end))
            return self.at(iteration, used)

    @contextmanager
    def held(self) -> Iterator[tuple[int, int]]:
        """Let nothing be drawn inside; yields how far this rank has drawn."""
        with self._lock:
            yield self._drawn

    def change(self, begin: tuple[int, int], division: Division) -> None:
        """Divide so from `begin`, an iteration and a place in it, which no rank has drawn. To be `held`."""
        assert begin >= self._drawn, f"drawn up to {self._drawn}, and shares are to change from {begin}"
        self._changes = [*(each for each in self._changes if each[:2] < begin), ShareChange(*begin, division)]

    # -- saved states --------------------------------------------------------------------------

    def state(self, iteration: int, used: int) -> list[list[Any]]:
        """Return, as JSON, what the rest of an iteration is divided by; at its beginning, what comes next."""
        if not used:
            return [[0, list(each.division.speeds)] for each in self._changes[-1:]]
        now = self.at(iteration, used)
        later = [each for each in self._changes if each.iteration == iteration and each.used > used]
        first = [] if now is None else [[used, list(now.speeds)]]
        return [*first, *([each.used, list(each.division.speeds)] for each in later)]

    def load(self, state: Sequence[Sequence[Any]], cap: int) -> Division:
        """Go on in the iteration that began last as `state` says; return what it ends with."""
        with self._lock:
            made = [ShareChange(self.iteration, int(used), Division(tuple(speeds), cap)) for used, speeds in state]
            self._changes = [made[0]._replace(used=0), *made[1:]]
            return made[-1].division


def is_share_state(value: Any) -> bool:
    """Return whether `value` is what `ShareChanges.state` returns, and not empty."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_row(row) for row in value)


def _is_row(row: Any) -> bool:
    if not (isinstance(row, (list, tuple)) and len(row) == 2 and isinstance(row[1], (list, tuple)) and row[1]):
        return False
    return type(row[0]) is int and row[0] >= 0 and _are_speeds(row[1])


def _are_speeds(values: Iterable[Any]) -> bool:
    return all(isinstance(each, float) and 0 < each < math.inf for each in values)


# Shares by measured speed: all ranks exchange what they measured every some steps, and decide alike.

WARM_UP_STEPS = 5
WINDOW_STEPS = 10
"""At least, between two exchanges of what was measured."""
LEAST_SECONDS = 0.25
"""The same: an exchange takes about a millisecond."""
_VAIN = "plan: balance = {!r} has no effect: no loader of farandole.shard has been iterated over"


class Balancer:
    """The shares of the loaders of one world, which keeps it. To be made by all ranks."""

    def __init__(self, here: World, keys: BalanceKeys) -> None:
        self._here, self.keys = here, keys
        self.division = Division(keys.shares or (1.0,) * here.sample_size, keys.cap)
        """What new loaders begin with, and those that are there change to."""
        self._loaders: weakref.WeakValueDictionary[int, ShareChanges] = weakref.WeakValueDictionary()
        self._whole = 0
        self._said = ""
        self._meter = ComputeMeter(here.session.recorder)
        self._decision = ShareDecision(self.division)
        self._first_step = keys.since_step + WARM_UP_STEPS  # the same on all ranks, whenever each makes this
        self._next_step = self._first_step + WINDOW_STEPS
        if self.is_measured:
            here.session.recorder = self._meter
        here.session.steps.after_step(self._step_ends)

    @property
    def is_measured(self) -> bool:
        """Whether shares follow the ranks' speed."""
        return self.keys.balance == SPEED

    def open_loader(self, number: int, whole: int) -> ShareChanges:
        """Return the shares of a loader whose batches have `whole` samples; `number`: the same on all ranks."""
        changes = self._loaders[number] = ShareChanges(self.division)
        self._whole = max(self._whole, whole)
        self._record(self.division)
        return changes

    def adopt(self, division: Division) -> None:
        """Go on with the shares of a saved state; on all ranks alike."""
        self.division = division
        self._decision = ShareDecision(division)
        self._record(division)

    def _step_ends(self, step: int) -> None:
        if not self.is_measured:
            if step == self._next_step and not self._whole:
                write_notice(_VAIN.format(self.keys.balance))
            return
        self._meter.step_ends()
        if step == self._first_step:
            self._meter.take()  # what is before is cold
        if step >= self._next_step:
            self._exchange(step, self._meter.take())
        self._meter.step_begins()

    def _exchange(self, step: int, mine: ComputeTimes) -> None:
        rows, whole = self._everyones(mine)
        step_seconds = max(row.step_seconds for row in rows)
        wanted = math.ceil(LEAST_SECONDS / step_seconds) if step_seconds else 0
        self._next_step = step + max(WINDOW_STEPS, wanted)
        if not all(row.sample_seconds > 0 for row in rows):
            if not whole and self._here.is_main and not self._said:
                self._said = _VAIN.format(self.keys.balance)
                write_notice(self._said)
            return
        window = Window(
            tuple(row.sample_seconds for row in rows), step_seconds, max(row.compute_seconds for row in rows),
            whole, tuple(int(row.samples) for row in rows),
        )  # fmt: skip
        decision = self._decision.take(window)
        if decision is not None:
            self._say(decision)
            self.division = decision.division
            self._change()
            self._record(self.division)

    def _everyones(self, mine: ComputeTimes) -> tuple[list[ComputeTimes], int]:
        """Return what each rank measured, and the samples of a batch of all ranks."""
        own = torch.tensor([*mine, self._whole], dtype=torch.float64)
        table = [torch.empty_like(own) for _ in range(self._here.size)]
        with translated(self._here, "speeds of the ranks"):
            dist.all_gather(table, own, group=self._here.group)
        rows = [row.tolist() for row in table]
        return [ComputeTimes(*row[:-1]) for row in rows], int(max(row[-1] for row in rows))

    def _change(self) -> None:
        """Divide by the new shares from where no rank has drawn. See [Note: where shares change]."""
        loaders = dict(self._loaders)
        with ExitStack() as held:
            drawn = {str(number): held.enter_context(each.held()) for number, each in loaders.items()}
            everyones = all_gather_json(self._here, "batches that were drawn", drawn)
            for number, changes in loaders.items():
                places = [tuple(each[str(number)]) for each in everyones if str(number) in each]
                changes.change(max(places), self.division)

    def _say(self, decision: Decision) -> None:
        if self._here.is_main:
            old, new = (_text(each.counts(self._whole)) for each in (self.division, decision.division))
            why = f"steps should be {decision.gain:.2f} times as fast"
            if decision.returns:
                why = "steps did not become as much shorter as predicted"
            write_notice(f"balance: samples of a batch by rank were {old}, and will be {new}: {why}")

    def _record(self, division: Division) -> None:
        if self._whole and (text := _text(division.counts(self._whole))) != self._said:
            self._said = text
            self._here.session.recorder.record(Setup({SETUP_SHARES: text}))


def balancer_of(here: World) -> Balancer | None:
    """Return that of a world whose plan has shares; None: they are equal, or not known yet."""
    keys = balance_of(here)
    return None if keys is None else here.session.keep(Balancer, lambda: Balancer(here, keys))


def open_balancer(here: World, _: int) -> int | None:
    """Make it, if a plan asks for it: after the same step on all ranks, whenever each begins to load."""
    balancer_of(here)
    return NEVER if is_balance_known(here) else None


def _text(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts))

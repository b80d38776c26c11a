"""Shares by measured speed: all ranks exchange what they measured every some steps, and decide alike."""

from __future__ import annotations

import math
import weakref
from contextlib import ExitStack

import torch
import torch.distributed as dist

from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.degrees import SPEED
from ...core.vocabulary.events import SETUP_SHARES, Setup
from ...core.vocabulary.notice import write_notice
from ...parallel.data.balance import BalanceKeys, balance_of
from .compute_meter import ComputeMeter, ComputeTimes
from .decision import Decision, ShareDecision, Window
from .share_changes import Division, ShareChanges

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


class OpenBalancer:
    """Makes the balancer on all ranks after the same step, whenever each iterates over its loader first."""

    def __init__(self, here: World) -> None:
        self._here = here

    def after_step(self, step: int) -> None:
        """Make it, if a plan asks for it and it is not there."""
        balancer_of(self._here)


def _text(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts))

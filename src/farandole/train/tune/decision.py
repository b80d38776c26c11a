"""Which setting the next steps run by: a state machine of plain values. Blocks of steps in, orders out.

[Note: blocks around a trial] A setting is tried between two blocks of the one in force (A-B-A), so that a machine
that becomes slower or faster meanwhile is no gain. What is undecided is tried again, up to `ROUNDS` times; what
is certain is taken, and its first block of steps then has to confirm it, or it is rolled back. Blocks of the
setting in force cost nothing; the steps of trials do, and count against the budget. Where several settings were
taken one after the other, the settings at first are measured once more at the end, in the same way: that is what
all gained together, and if it is a loss, all are rolled back.

[Note: the budget] A trial takes `TuneLimits.trial_steps`. All trials together take at most the share of the run's
steps that is allowed, or one trial if that is more. If the length of the run is not known, trials wait until so
many steps are done that they are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from .block import StepBlock, StepGain, gain_of

T = TypeVar("T")

ROUNDS = 3
_LEAST_GAIN = 0.005
"""A setting that gains less is not worth a switch."""
_HOPELESS = 1.3
"""A trial whose steps are this many times as long is not measured further."""

ADOPTED = "adopted"
NOISE = "inside the noise"
SLOWER = "slower"
ROLLED_BACK = "rolled back"
FAILED = "failed"
NOT_FINISHED = "not finished"


@dataclass(frozen=True)
class TuneLimits:
    """How much may be tried."""

    trials: int = 10
    budget: float = 0.02
    """Share of the run's steps that may run by a setting that is being tried."""
    block_steps: int = 5
    settle_steps: int = 2
    """Steps after a switch that are not counted."""

    @property
    def trial_steps(self) -> int:
        """What one trial needs at least."""
        return self.settle_steps + self.block_steps


@dataclass(frozen=True)
class BlockOrder(Generic[T]):
    """What to do until the ranks meet again."""

    setting: T
    skip: int
    """Steps that are not counted."""
    count: int
    """Steps after these, which make the next block."""
    text: str
    """For people."""
    is_last: bool = False
    """Whether the ranks need not meet again."""


@dataclass
class SettingTrial(Generic[T]):
    """One setting that was tried."""

    setting: T
    instead_of: T
    step: int
    """The step before the trial."""
    before: list[tuple[float, ...]] = field(default_factory=list)
    """Seconds of the steps around it, by round."""
    tried: list[tuple[float, ...]] = field(default_factory=list)
    verdict: str = ""
    why: str = ""
    gain: StepGain | None = None


class SettingSearch(Protocol[T]):
    """What says which setting to try next."""

    def next(self, incumbent: T, *, is_exchange_hidden: bool) -> T | None:
        """Return a setting that was not tried yet; None: nothing is left.

        `is_exchange_hidden`: no change of the exchange alone can gain anything.
        """

    def has_more(self, incumbent: T) -> bool:
        """Return whether there is one that can gain something where the exchange is hidden."""


class TuneDecision(Generic[T]):
    """Decides for all ranks, on one of them."""

    def __init__(self, start: T, search: SettingSearch[T], limits: TuneLimits) -> None:
        self._search, self._limits = search, limits
        self.start = self.incumbent = start
        """The setting in force; trials are compared with it."""
        self.trials: list[SettingTrial[T]] = []
        self.stopped = ""
        """Why nothing is tried any more; empty while something is."""
        self.is_cut_short = True
        """Whether settings are left that a longer run, or one that goes on, would try."""
        self.spent_steps = 0
        """By settings that were being tried."""
        self.overall: StepGain | None = None
        """What all settings that were taken gained together, where that was measured at the end."""
        self.first_block: StepBlock | None = None
        self.block: StepBlock | None = None
        """The newest of the setting in force."""
        self._trial: SettingTrial[T] | None = None
        self._expects: Callable[[StepBlock, int, int | None], BlockOrder[T]] = self._take_incumbent

    def begin(self) -> BlockOrder[T]:
        """Return the first order: steps as they are."""
        return BlockOrder(self.start, 0, self._limits.block_steps, "measuring steps as they are")

    def take(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        """Take the block that the last order asked for.

        Args:
            block: of the slowest rank.
            step: steps that are done.
            total_steps: those of the whole run; None: not known.
        """
        return self._expects(block, step, total_steps)

    def abandon(self, why: str) -> BlockOrder[T]:
        """Try nothing more: something changed that the blocks so far say nothing of."""
        if self._trial is not None and not self._trial.verdict:
            self._close(self._trial, NOT_FINISHED, why)
        return self._finish(why)

    def withdraw(self, why: str) -> BlockOrder[T]:
        """Go back to the settings at first for good: something that was taken turned out to change results."""
        for trial in self._adopted:
            self._close(trial, ROLLED_BACK, why)
        self.incumbent = self.start
        return self.abandon(why)

    # -- what blocks are of ------------------------------------------------------------------------

    def _take_incumbent(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        """A block of the setting in force, with no trial open."""
        self.first_block = self.first_block or block
        self.block = block
        if block.alarm:
            return self._finish(f"{block.alarm}, with nothing being tried")
        return self._try_next(block, step, total_steps)

    def _take_trial(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        """A block of the setting that is being tried."""
        trial = self._open_trial
        self.spent_steps += self._limits.trial_steps
        if block.alarm:
            self._close(trial, FAILED, block.alarm)
            return self._back(f"{block.alarm}: back")
        trial.tried.append(block.seconds)
        if block.median_seconds > _HOPELESS * self._block.median_seconds:
            self._close(trial, SLOWER, "", trial.tried[-1])
            return self._back("slower: back")
        self._expects = self._take_after
        return self._order(self.incumbent, "steps after a trial")

    def _take_after(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        """A block of the setting in force that ends a round of a trial."""
        trial, before, self.block = self._open_trial, self._block, block
        if block.alarm:
            self._close(trial, FAILED, block.alarm)
            return self._finish(f"{block.alarm}, with nothing being tried")
        trial.before.append((*before.seconds, *block.seconds))
        gain = trial.gain = gain_of(trial.tried, trial.before)
        if gain.is_certain and gain.share >= _LEAST_GAIN:
            self._expects = self._take_confirmation
            return self._order(trial.setting, f"taking {gain.share:.1%} shorter steps")
        hopes = gain.interval[1] >= _LEAST_GAIN
        if hopes and len(trial.tried) < ROUNDS and self._can_afford(step, total_steps):
            self._expects = self._take_trial
            return self._order(trial.setting, "undecided: once more")
        self._close(trial, SLOWER if gain.is_loss else NOISE, "")
        return self._try_next(block, step, total_steps)

    def _take_confirmation(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        """The first block of a setting that was taken."""
        trial, before = self._open_trial, self._block
        if block.alarm:
            self._close(trial, ROLLED_BACK, block.alarm)
            return self._back(f"{block.alarm}: rolled back")
        now = gain_of([block.seconds], [before.seconds])
        if now.is_loss:
            trial.gain = now
            self._close(trial, ROLLED_BACK, "its steps were longer after the switch")
            return self._back("slower after the switch: rolled back")
        self._close(trial, ADOPTED, "")
        self.incumbent, self.block = trial.setting, block
        return self._try_next(block, step, total_steps)

    def _take_first_setting(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        """At the end: a block of the settings at first."""
        self.spent_steps += self._limits.trial_steps
        self._expects = partial(self._take_last, block)
        return self._order(self.incumbent, "comparing with the settings at first")

    def _take_last(self, first: StepBlock, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        """The last block of the setting in force, after one of the settings at first."""
        self.overall = gain_of([(*self._block.seconds, *block.seconds)], [first.seconds])
        self.block = block
        if self.overall.is_loss:
            for trial in self._adopted:
                self._close(trial, ROLLED_BACK, "slower than the settings at first, all together")
            self.incumbent, self.block = self.start, first
        return self._finish(self.stopped)

    # -- what comes next ---------------------------------------------------------------------------

    def _try_next(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder[T]:
        self._trial = None
        if len(self.trials) >= self._limits.trials:
            return self._end(f"{self._limits.trials} trials were made", step, total_steps)
        most, noise = block.exposed_share, _noise(block)
        is_hidden = most < max(_LEAST_GAIN, noise)
        if is_hidden and not self._search.has_more(self.incumbent):
            self.is_cut_short = most >= _LEAST_GAIN
            gain = f"steps vary by more ({noise:.1%})" if self.is_cut_short else "no more can be gained"
            text = f"ranks wait for communication in only {most:.1%} of a step: {gain}"
            return self._end(text, step, total_steps)
        if total_steps is not None and step + 2 * self._limits.trial_steps > total_steps:
            return self._finish("the run ends")
        if not self._can_afford(step, total_steps):
            if total_steps is not None:
                return self._finish(f"the budget is used: {self.spent_steps} of {total_steps} steps")
            wait = math.ceil((self.spent_steps + self._limits.trial_steps) / self._limits.budget) - step
            self._expects = self._take_incumbent
            return BlockOrder(
                self.incumbent, max(0, wait), self._limits.block_steps, f"waiting until step {step + wait}"
            )
        setting = self._search.next(self.incumbent, is_exchange_hidden=is_hidden)
        if setting is None:
            self.is_cut_short = False
            return self._end("no other setting is left that is worth a trial", step, total_steps)
        self._trial = SettingTrial(setting, self.incumbent, step)
        self.trials.append(self._trial)
        self._expects = self._take_trial
        return self._order(setting, f"trial {len(self.trials)} of at most {self._limits.trials}")

    def _end(self, why: str, step: int, total_steps: int | None) -> BlockOrder[T]:
        """Try nothing more; compare with the settings at first where several were taken."""
        fits = total_steps is None or step + 2 * self._limits.trial_steps <= total_steps
        if len(self._adopted) < 2 or not fits or not self._can_afford(step, total_steps):
            return self._finish(why)
        self.stopped = why
        self._expects = self._take_first_setting
        return self._order(self.start, "comparing with the settings at first")

    @property
    def _adopted(self) -> list[SettingTrial[T]]:
        return [trial for trial in self.trials if trial.verdict == ADOPTED]

    def _can_afford(self, step: int, total_steps: int | None) -> bool:
        """See [Note: the budget]."""
        known = step if total_steps is None else total_steps
        allowed = max(self._limits.trial_steps, self._limits.budget * known)
        return self.spent_steps + self._limits.trial_steps <= allowed

    def _back(self, text: str) -> BlockOrder[T]:
        self._trial = None
        self._expects = self._take_incumbent
        return self._order(self.incumbent, text)

    def _order(self, setting: T, text: str) -> BlockOrder[T]:
        return BlockOrder(setting, self._limits.settle_steps, self._limits.block_steps, text)

    def _finish(self, why: str) -> BlockOrder[T]:
        self.stopped = why
        return BlockOrder(self.incumbent, 0, 0, why, is_last=True)

    def _close(
        self, trial: SettingTrial[T], verdict: str, why: str, tried: tuple[float, ...] | None = None
    ) -> None:
        trial.verdict, trial.why = verdict, why
        if tried is not None:
            trial.gain = gain_of([tried], [self._block.seconds])

    @property
    def _open_trial(self) -> SettingTrial[T]:
        assert self._trial is not None, "this block was asked for in a trial"
        return self._trial

    @property
    def _block(self) -> StepBlock:
        assert self.block is not None, "a block of the setting in force comes first"
        return self.block


def _noise(block: StepBlock) -> float:
    """Return the least gain that all rounds of a trial would show, as a share: half the interval of nothing."""
    low, high = gain_of([block.seconds], [block.seconds]).interval
    return (high - low) / 2 / math.sqrt(ROUNDS)

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
import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..comm.autotune.autotuner import FASTEST_SLACK, assign_codecs
from ..comm.autotune.profile import Look
from ..core.bucket_plan import BucketPlan, ExchangeKeys
from ..core.step_model import CANDIDATES, Interval, StepProfile, buckets_of, nested_ratio, predict_step
from ..core.vocabulary.codec_spec import NONE
from ..core.vocabulary.errors import PlanError
from ..core.vocabulary.spec import Plan

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
class BlockOrder:
    """What to do until the ranks meet again."""

    setting: ExchangeKeys
    skip: int
    """Steps that are not counted."""
    count: int
    """Steps after these, which make the next block."""
    text: str
    """For people."""
    is_last: bool = False
    """Whether the ranks need not meet again."""


@dataclass
class SettingTrial:
    """One setting that was tried."""

    setting: ExchangeKeys
    instead_of: ExchangeKeys
    step: int
    """The step before the trial."""
    before: list[tuple[float, ...]] = field(default_factory=list)
    """Seconds of the steps around it, by round."""
    tried: list[tuple[float, ...]] = field(default_factory=list)
    verdict: str = ""
    why: str = ""
    gain: StepGain | None = None


class TuneDecision:
    """Decides for all ranks, on one of them."""

    def __init__(self, start: ExchangeKeys, search: PatternSearch, limits: TuneLimits) -> None:
        self.search, self._limits = search, limits
        self.start = self.incumbent = start
        """The setting in force; trials are compared with it."""
        self.trials: list[SettingTrial] = []
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
        self._trial: SettingTrial | None = None
        self._expects: Callable[[StepBlock, int, int | None], BlockOrder] = self._take_incumbent

    def take(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
        """Take the block that the last order asked for.

        Args:
            block: of the slowest rank.
            step: steps that are done.
            total_steps: those of the whole run; None: not known.
        """
        return self._expects(block, step, total_steps)

    def abandon(self, why: str) -> BlockOrder:
        """Try nothing more: something changed that the blocks so far say nothing of."""
        if self._trial is not None and not self._trial.verdict:
            self._close(self._trial, NOT_FINISHED, why)
        return self._finish(why)

    def withdraw(self, why: str) -> BlockOrder:
        """Go back to the settings at first for good: something that was taken turned out to change results."""
        for trial in self._adopted:
            self._close(trial, ROLLED_BACK, why)
        self.incumbent = self.start
        return self.abandon(why)

    # -- what blocks are of ------------------------------------------------------------------------

    def _take_incumbent(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
        """A block of the setting in force, with no trial open."""
        self.first_block = self.first_block or block
        self.block = block
        if block.alarm:
            return self._finish(f"{block.alarm}, with nothing being tried")
        return self._try_next(block, step, total_steps)

    def _take_trial(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
        """A block of the setting that is being tried."""
        trial = self._open_trial
        self.spent_steps += self._limits.trial_steps
        if block.alarm:
            self._close(trial, FAILED, block.alarm)
            return self._back(f"{block.alarm}: back")
        trial.tried.append(block.seconds)
        if block.median_seconds > _HOPELESS * self._block.median_seconds:
            trial.gain = gain_of([block.seconds], [self._block.seconds])
            self._close(trial, SLOWER, "")
            return self._back("slower: back")
        self._expects = self._take_after
        return self._order(self.incumbent, "steps after a trial")

    def _take_after(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
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

    def _take_confirmation(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
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

    def _take_first_setting(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
        """At the end: a block of the settings at first."""
        self.spent_steps += self._limits.trial_steps
        self._expects = partial(self._take_last, block)
        return self._order(self.incumbent, "comparing with the settings at first")

    def _take_last(self, first: StepBlock, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
        """The last block of the setting in force, after one of the settings at first."""
        self.overall = gain_of([(*self._block.seconds, *block.seconds)], [first.seconds])
        self.block = block
        if self.overall.is_loss:
            for trial in self._adopted:
                self._close(trial, ROLLED_BACK, "slower than the settings at first, all together")
            self.incumbent, self.block = self.start, first
        return self._finish(self.stopped)

    # -- what comes next ---------------------------------------------------------------------------

    def _try_next(self, block: StepBlock, step: int, total_steps: int | None) -> BlockOrder:
        self._trial = None
        if len(self.trials) >= self._limits.trials:
            return self._end(f"{self._limits.trials} trials were made", step, total_steps)
        most, noise = block.exposed_share, _noise(block)
        is_hidden = most < max(_LEAST_GAIN, noise)
        if is_hidden and not self.search.has_more(self.incumbent):
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
        setting = self.search.next(self.incumbent, is_exchange_hidden=is_hidden)
        if setting is None:
            self.is_cut_short = False
            return self._end("no other setting is left that is worth a trial", step, total_steps)
        self._trial = SettingTrial(setting, self.incumbent, step)
        self.trials.append(self._trial)
        self._expects = self._take_trial
        return self._order(setting, f"trial {len(self.trials)} of at most {self._limits.trials}")

    def _end(self, why: str, step: int, total_steps: int | None) -> BlockOrder:
        """Try nothing more; compare with the settings at first where several were taken."""
        fits = total_steps is None or step + 2 * self._limits.trial_steps <= total_steps
        if len(self._adopted) < 2 or not fits or not self._can_afford(step, total_steps):
            return self._finish(why)
        self.stopped = why
        self._expects = self._take_first_setting
        return self._order(self.start, "comparing with the settings at first")

    @property
    def _adopted(self) -> list[SettingTrial]:
        return [trial for trial in self.trials if trial.verdict == ADOPTED]

    def _can_afford(self, step: int, total_steps: int | None) -> bool:
        """See [Note: the budget]."""
        known = step if total_steps is None else total_steps
        allowed = max(self._limits.trial_steps, self._limits.budget * known)
        return self.spent_steps + self._limits.trial_steps <= allowed

    def _back(self, text: str) -> BlockOrder:
        self._trial = None
        self._expects = self._take_incumbent
        return self._order(self.incumbent, text)

    def _order(self, setting: ExchangeKeys, text: str) -> BlockOrder:
        return BlockOrder(setting, self._limits.settle_steps, self._limits.block_steps, text)

    def _finish(self, why: str) -> BlockOrder:
        self.stopped = why
        return BlockOrder(self.incumbent, 0, 0, why, is_last=True)

    def _close(self, trial: SettingTrial, verdict: str, why: str) -> None:
        trial.verdict, trial.why = verdict, why

    @property
    def _open_trial(self) -> SettingTrial:
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


# Some steps in a row by one setting, and what one setting gains over another.


@dataclass(frozen=True)
class StepBlock:
    """Steps by one setting, as the slowest rank had them."""

    seconds: tuple[float, ...]
    """Duration of each step, in order; those after a switch, which make buckets, are not among them."""
    exposed_seconds: float = 0.0
    """Communication in a step that no computation hides, on the rank that waits least for the others."""
    alarm: str = ""
    """Why the setting cannot stay, whatever it gains: memory, or a rank that could not switch."""

    @property
    def median_seconds(self) -> float:
        """The step that counts."""
        return statistics.median(self.seconds)

    @property
    def exposed_share(self) -> float:
        """The most that any setting could gain, as a share of the step."""
        return min(1.0, self.exposed_seconds / self.median_seconds) if self.median_seconds > 0 else 0.0


def slowest(
    seconds_by_rank: Sequence[Sequence[float]], waits_by_rank: Sequence[float], alarm: str = ""
) -> StepBlock:
    """Return the block of the rank whose median step is longest. All ranks have as many steps, at least one."""
    worst = max(seconds_by_rank, key=statistics.median)
    return StepBlock(tuple(worst), min(waits_by_rank), alarm)


@dataclass(frozen=True)
class StepGain:
    """How much shorter steps are: a share of the step, negative where they are longer; 95 % interval."""

    share: float
    interval: Interval

    @property
    def is_certain(self) -> bool:
        """Whether the interval holds only gains."""
        return self.interval[0] > 0

    @property
    def is_loss(self) -> bool:
        """Whether the interval holds only losses."""
        return self.interval[1] < 0


def gain_of(tried: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> StepGain:
    """Return the gain of `tried` over `before`, whose steps were measured around it, round by round; seconds.

    Blocks before and after a trial, together, cancel what drifts evenly.
    """
    ratio, (low, high) = nested_ratio(tried, before)
    return StepGain(1 - ratio, (1 - high, 1 - low))


# Which setting is tried next: the best by the step model first, then neighbours of what is best so far.
#
# [Note: a pattern search] Bucket sizes lie on a grid of powers of two. From the setting in force the size is tried
# two places up and down, then one; whatever is adopted is the middle of the next round. So a size that the step
# model got wrong by a factor of 2^k takes about k/2 + 4 trials to correct, where steps are shortest at one size
# and longer the further from it. Then the size of the first bucket and the number of connections are searched
# alike.


LEAST_BUCKET_BYTES = 2**18
_STRIDES = (2, 1)
_CONNECTIONS = (1, 2, 4)
_MOST_PREDICTED = 4
"""Settings of the step model that are tried, whatever came of the first."""


def bucket_grid(gradient_bytes: int) -> tuple[int, ...]:
    """Return the bucket sizes to choose from, ascending: powers of two, the last one holds all gradients."""
    sizes = [LEAST_BUCKET_BYTES]
    while sizes[-1] < gradient_bytes:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _as_it_is(keys: ExchangeKeys) -> Hashable:
    return keys


@dataclass
class PatternSearch:
    """Says which keys of the exchange to try next. See [Note: a pattern search]."""

    predicted: Sequence[ExchangeKeys]
    """The best by the step model, the best one first."""
    sizes: Sequence[int]
    """Bucket sizes, ascending."""
    names: Sequence[str]
    """Keys that may change."""
    layout: Callable[[ExchangeKeys], Hashable] = _as_it_is
    """What tells settings apart: two of the same buckets are one."""
    by_messages: Callable[[ExchangeKeys], bool] = lambda keys: keys.codec != NONE or keys.route == "hierarchical"
    """Whether buckets travel over connections of our own, which `connections` counts."""
    is_settled: bool = False
    """Whether an earlier run has searched around the first of `predicted`, so that only that is tried."""
    most_micro_batches: int = 1
    """Samples of the smallest batch of a rank: no larger number of micro-batches is tried."""
    has_room: bool = False
    """Whether all ranks have memory for larger micro-batches than those in force."""
    tried: set[Hashable] = field(default_factory=set)

    def next(self, incumbent: ExchangeKeys, *, is_exchange_hidden: bool = False) -> ExchangeKeys | None:
        """Return the next setting to try; None: all that this search would try were tried."""
        keys = self._first_untried(incumbent, is_exchange_hidden=is_exchange_hidden)
        if keys is not None:
            self.tried.add(self.layout(keys))
        return keys

    def has_more(self, incumbent: ExchangeKeys) -> bool:
        """Return whether a setting that changes computation, and not only the exchange, was not tried yet."""
        return self._first_untried(incumbent, is_exchange_hidden=True) is not None

    def _first_untried(self, incumbent: ExchangeKeys, *, is_exchange_hidden: bool) -> ExchangeKeys | None:
        self.tried.add(self.layout(incumbent))
        wanted = self._other_micro_batches(incumbent) if is_exchange_hidden else self._wanted(incumbent)
        fitting = (keys for keys in wanted if self._fits(keys, incumbent))
        return next((keys for keys in fitting if self.layout(keys) not in self.tried), None)

    def _fits(self, keys: ExchangeKeys, incumbent: ExchangeKeys) -> bool:
        """Return whether there is memory for the micro-batches of `keys`: as large as those in force, or twice."""
        number = keys.micro_batches
        return number >= incumbent.micro_batches or (self.has_room and 2 * number >= incumbent.micro_batches)

    def _wanted(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        if self.is_settled:
            yield from self.predicted[:1]
            return
        for keys in self.predicted[:_MOST_PREDICTED]:
            yield replace(keys, micro_batches=incumbent.micro_batches)
        yield from self._other_micro_batches(incumbent)
        if "bucket_bytes" in self.names:
            yield from self._other_sizes(incumbent)
        if "first_bucket_bytes" in self.names:
            yield from self._other_first_sizes(incumbent)
        if "connections" in self.names and self.by_messages(incumbent):
            for count in _CONNECTIONS:
                yield replace(incumbent, connections=count)

    def _other_micro_batches(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        """Yield half as many micro-batches, and twice as many; in a settled search those that were found."""
        number = incumbent.micro_batches
        if "micro_batches" not in self.names:
            return
        if self.is_settled:
            yield from (keys for keys in self.predicted[:1] if keys.micro_batches != number)
            return
        if number > 1:
            yield replace(incumbent, micro_batches=-(-number // 2))
        if 2 * number <= self.most_micro_batches:
            yield replace(incumbent, micro_batches=2 * number)

    def _other_sizes(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        for size in self._around(incumbent.bucket_bytes):
            first = incumbent.first_bucket_bytes
            if first >= incumbent.bucket_bytes or first > size:
                first = size if "first_bucket_bytes" in self.names else first
            yield replace(incumbent, bucket_bytes=size, first_bucket_bytes=first)

    def _other_first_sizes(self, incumbent: ExchangeKeys) -> Iterator[ExchangeKeys]:
        for size in self._around(min(incumbent.first_bucket_bytes, incumbent.bucket_bytes)):
            if size <= incumbent.bucket_bytes:
                yield replace(incumbent, first_bucket_bytes=size)

    def _around(self, size: int) -> Iterator[int]:
        """Yield sizes of the grid around `size`: two places away, then one."""
        place = min(range(len(self.sizes)), key=lambda i: abs(self.sizes[i].bit_length() - size.bit_length()))
        for stride in _STRIDES:
            for other in (place + stride, place - stride):
                yield self.sizes[min(max(other, 0), len(self.sizes) - 1)]


# The settings that the step model holds for best, from what was measured of the job. Pure.


_MIB = 2**20
_WORTH_A_TRIAL = 1.1
"""A route or codec is not tried if its best step is predicted this many times as long as the present one."""
_APART = 4
"""Factor between the bucket sizes of one route and codec that are both tried: nearer ones are searched later."""


def predicted_seconds(look: Look, keys: ExchangeKeys) -> float:
    """Return what a step takes by `keys`, as the step model says."""
    profile = look.profiles[keys.route]
    return predict_step(profile, look.links[keys.route], _bucket_plan(profile, keys)).seconds


def layout_of(look: Look | None, keys: ExchangeKeys) -> Hashable:
    """Return what is the same for settings that exchange the same buckets in the same way."""
    if look is None:
        return keys
    profile = look.profiles[keys.route]
    buckets = buckets_of(profile, _bucket_plan(profile, keys))
    return keys.route, keys.codec, keys.connections, keys.micro_batches, tuple(len(bucket) for bucket in buckets)


def rank_by_prediction(
    look: Look, now: ExchangeKeys, plan: Plan, names: Sequence[str], sizes: Sequence[int], *, lossy: bool
) -> tuple[list[ExchangeKeys], list[str]]:
    """Return the settings to try, the best first, and why some are none.

    Args:
        look: what was measured.
        now: the setting in force.
        plan: the plan of the job.
        names: keys that may change.
        sizes: bucket sizes to choose from, in bytes.
        lossy: whether codecs that lose precision may be tried.
    """
    groups: list[list[tuple[float, ExchangeKeys]]] = []
    refused: list[str] = []
    for route in look.profiles if "route" in names else [now.route]:
        codecs = CANDIDATES if lossy and "codec" in names else (now.codec,)
        fastest = float("inf")  # of the gentler codecs on this route
        for codec in codecs:
            like = replace(now, route=route, codec=codec)  # type: ignore[arg-type]
            try:
                like.on(plan)
            except PlanError as problem:
                refused.append(problem.message)
                continue
            group = _group(look, like, names, sizes)
            if group and group[0][0] * FASTEST_SLACK < fastest:
                fastest = group[0][0]
                groups.append(group)
    is_known = now.codec in look.profiles[now.route].speeds
    limit = _WORTH_A_TRIAL * predicted_seconds(look, now) if is_known else float("inf")
    groups = sorted((each for each in groups if each[0][0] <= limit), key=lambda group: group[0][0])
    ranked = [group[0][1] for group in groups]
    for _, keys in groups[0] if groups else []:
        if all(not _is_near(keys, other) for other in ranked if other.codec == keys.codec):
            ranked.append(keys)
    return ranked, refused


def _group(
    look: Look, like: ExchangeKeys, names: Sequence[str], sizes: Sequence[int]
) -> list[tuple[float, ExchangeKeys]]:
    """Return the settings of one route and codec with what is predicted for them, the best first."""
    profile = look.profiles[like.route]
    if like.codec not in profile.speeds:
        return []
    if like.codec != NONE and set(assign_codecs(profile, like.codec).values()) == {NONE}:
        return []
    found = []
    for size in sizes if "bucket_bytes" in names else [like.bucket_bytes]:
        firsts = {min(_MIB, size), size} if "first_bucket_bytes" in names else {like.first_bucket_bytes}
        for first in sorted(firsts):
            keys = replace(like, bucket_bytes=size, first_bucket_bytes=first)
            found.append((predicted_seconds(look, keys), keys))
    return sorted(found, key=lambda each: each[0])


def _is_near(one: ExchangeKeys, other: ExchangeKeys) -> bool:
    return 1 / _APART < one.bucket_bytes / other.bucket_bytes < _APART


def _bucket_plan(profile: StepProfile, keys: ExchangeKeys) -> BucketPlan:
    codecs = {} if keys.codec == NONE else assign_codecs(profile, keys.codec)
    return BucketPlan(codecs, keys.bucket_bytes, keys.first_bucket_bytes)

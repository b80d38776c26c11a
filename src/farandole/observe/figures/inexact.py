"""What a run says where it trains unlike one process: ranks on their own, late gradients, lossy codecs.

[Note: one number] The closing summary, the diagnosis, the comparison and the page show the same figures, so they
take them from the same steps: those after the warm-up that all ranks have recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.events import (
    EXCHANGE,
    SETUP_APART,
    SETUP_CRITICAL_BATCH,
    SETUP_CRITICAL_HIGH,
    SETUP_CRITICAL_LOW,
    SETUP_MEETINGS,
    SETUP_REPLICAS,
    SETUP_SYNC,
    SETUP_WRAPPER,
)
from ...core.vocabulary.sync_spec import DEFAULT_STEPS, EVERY_STEP, MEASURED, MEASURED_CODEC, SyncSpec
from ..records.rows import StepRow
from ..records.run_reader import RunRecords
from ..records.timeline_reader import RankTimeline
from .figures import mean

# The critical batch that `fd.noise_scale` measured in a run. Definition: `docs/plan/planner.md`.


@dataclass(frozen=True)
class CriticalBatch:
    """The batch at which a loss needs twice the fewest steps and samples. In samples."""

    samples: float
    low: float
    """The interval in which it is likely to be."""
    high: float | None
    """None: not known."""
    global_batch: float | None
    """That of the run; None: not known."""

    def to_text(self) -> str:
        """Return it for the closing table."""
        high = "more" if self.high is None else f"{self.high:,.0f}"
        text = f"{self.samples:,.0f} samples (95%: {self.low:,.0f} to {high})"
        return text if self.global_batch is None else f"{text}, trained with {self.global_batch:,.0f}"


def critical_batch_of(timeline: RankTimeline, global_batch: float | None) -> CriticalBatch | None:
    """Return what rank 0, whose `timeline` this is, has recorded last; None: nothing."""
    found, low, high = (
        timeline.setup.get(name) for name in (SETUP_CRITICAL_BATCH, SETUP_CRITICAL_LOW, SETUP_CRITICAL_HIGH)
    )
    if not isinstance(found, (int, float)) or not isinstance(low, (int, float)) or not found > 0:
        return None
    return CriticalBatch(found, low, float(high) if isinstance(high, (int, float)) else None, global_batch)


# Which steps the figures of a run are of, and whether its exchanges were seen: asked by every figure.

FEW_STEPS = 10
"""Figures of fewer steps say so where they stand."""


def warm_up(steps: int) -> int:
    """Return how many steps to leave out of rates: three, or a tenth if that is more; fewer of a short run."""
    return min(max(3, steps // 10), max(0, steps - 1))


def common_steps(timelines: Sequence[RankTimeline]) -> list[int]:
    """Return the steps that all ranks have kept, in order."""
    if not timelines:
        return []
    return sorted(set.intersection(*({row.step for row in timeline.steps} for timeline in timelines)))


def counted_steps(timelines: Sequence[RankTimeline]) -> list[int]:
    """Return the steps that figures are of; the last one of a run that has none after its warm-up."""
    steps = common_steps(timelines)
    first = min((timeline.steps[0].step for timeline in timelines if timeline.steps), default=0)
    skip = warm_up(min((timeline.step_count for timeline in timelines), default=0))
    return [step for step in steps if step >= first + skip] or steps[-1:]


def sees_exchanges(timelines: Sequence[RankTimeline]) -> bool:
    """Whether any exchange was seen, or there is none. Otherwise what ranks communicate is unknown, not 0."""
    meets = any(SETUP_MEETINGS in timeline.setup for timeline in timelines)  # seldom, or after the last step
    return (
        meets
        or exchanges_none(timelines)
        or any(
            any(_has_exchange(row) for row in timeline.steps) or any(row.sent_bytes for row in timeline.thinned)
            for timeline in timelines
        )
    )


def exchanges_none(timelines: Sequence[RankTimeline]) -> bool:
    """Whether no rank holds the parameters of another, by the plan: then no gradients are exchanged."""
    return bool(timelines) and all(timeline.setup.get(SETUP_REPLICAS) == 1 for timeline in timelines)


def _has_exchange(row: StepRow) -> bool:
    return bool(row.exchanges) or EXCHANGE in row.more_seconds or any(p.name == EXCHANGE for p in row.phases)


def few_steps(counted: int, steps: int) -> str:
    """Return what to say of figures that come from few steps, or nothing."""
    return f"from {counted} of {steps} steps" if counted < min(FEW_STEPS, steps) else ""


_FEW_MEETINGS, _FEW_WITH_MOMENTUM = 20, 100
"""Fewer are warned of: docs/fast/rarely-meeting.md has what is known of the loss. An outer momentum needs more."""
_LEAST_BITS = 4
"""A codec of so many bits loses next to nothing of what a step learns (docs/fast/slow-networks.md)."""


def sync_of(records: RunRecords) -> SyncSpec:
    """Return when the run's replicas agree."""
    return parsed_sync(str(records.plan.get("sync", EVERY_STEP)))


def parsed_sync(text: str) -> SyncSpec:
    """Return what a recorded `sync` says; each step where it leaves that open, or is of a newer version."""
    try:
        return SyncSpec.parse(EVERY_STEP if text == MEASURED else text)
    except PlanError:
        return SyncSpec()


def few_meetings(sync: SyncSpec) -> int:
    """Return the number of meetings below which a run is warned."""
    return _FEW_WITH_MOMENTUM if sync.momentum else _FEW_MEETINGS


def codec_of(records: RunRecords) -> str:
    """Return the codec that was used for most bytes; "none" when nothing says another."""
    layouts = records.timelines[0].layouts if records.timelines else []
    if layouts:
        by_codec: dict[str, int] = {}
        for bucket in layouts[-1][1].buckets:
            by_codec[bucket.codec] = by_codec.get(bucket.codec, 0) + bucket.nbytes
        if by_codec:
            return max(by_codec, key=lambda name: by_codec[name])
    return str(records.plan.get("codec") or NONE)


def inexact_notes(records: RunRecords) -> list[str]:
    """Return what makes the training of a run another than that of one process; nothing of other runs."""
    notes = _meeting_notes(records)
    is_ours = not any(SETUP_WRAPPER in timeline.setup for timeline in records.timelines)  # torch's has no plan
    if records.size > 1 and is_ours:
        notes += [*_server_notes(sync_of(records)), *codec_notes(codec_of(records))]
    return notes


def _meeting_notes(records: RunRecords) -> list[str]:
    """Say how often ranks met, how far they were apart, and what that means."""
    timelines = records.timelines
    setup = timelines[0].setup if timelines else {}
    sync, count = setup.get(SETUP_SYNC), setup.get(SETUP_MEETINGS)
    if not sync or type(count) is not int:
        return []
    known = [timeline.setup.get(SETUP_APART) for timeline in timelines]
    apart = [float(each) for each in known if isinstance(each, (int, float))]
    times = f"{count} meeting{'s' * (count != 1)}"
    far = f", where ranks were {mean(apart):.2%} apart from their mean" if apart else ""
    notes = [f"sync {sync}: {times}{far}; this is not the training of one process (docs/fast/rarely-meeting.md)"]
    spec = parsed_sync(str(sync))
    if count < few_meetings(spec):
        few = f"{times} {'is' if count == 1 else 'are'} few{' for an outer momentum' if spec.momentum else ''}"
        remedy = "take a smaller H"
        if spec.momentum:
            remedy = "take sync=local" + (f":H={spec.steps}" if count >= _FEW_MEETINGS else " and a smaller H")
        elif records.plan.get("sync") == MEASURED:
            remedy = f"take sync=local:H={min(spec.steps // 2, DEFAULT_STEPS)} and codec={MEASURED_CODEC}"
        notes.append(f"warning: {few}: at equal samples expect a higher loss than without sync; {remedy}")
    return notes


def _server_notes(sync: SyncSpec) -> list[str]:
    if not sync.is_server or sync.staleness == 0:
        return []
    late = "any number of steps" if sync.staleness is None else f"up to {sync.staleness} steps"
    return [
        f"sync {sync.to_text()}: ranks train on parameters that lack {late} of the others; this is not the "
        "training of one process (docs/fast/rarely-meeting.md)"
    ]


def is_late(codec: str) -> bool:
    """Return whether a codec sends most of a gradient later, which costs some of the loss at equal samples."""
    try:
        spec = CodecSpec.parse(codec)
    except PlanError:
        return False
    form = spec.packed_format
    return not (spec.is_exact or spec.is_auto or spec.is_own or (form is not None and form.bits >= _LEAST_BITS))


def codec_notes(codec: str) -> list[str]:
    """Return what a codec costs of the loss, in a line; nothing of those that cost next to nothing."""
    if not is_late(codec):
        return []
    rest = "drops the rest" if CodecSpec.parse(codec).options.get("feedback") is False else "the rest later"
    return [
        f"codec {codec} sends a part of each gradient now and {rest}: at equal samples expect a higher "
        "loss, most of all at the beginning (docs/fast/rarely-meeting.md has figures); compare the loss"
    ]

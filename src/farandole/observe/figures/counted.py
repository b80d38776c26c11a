"""Which steps the figures of a run are of, and whether its exchanges were seen: asked by every figure.

[Note: one number] The closing summary, the diagnosis, the comparison and the page show the same figures, so they
take them from the same steps: those after the warm-up that all ranks have recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.vocabulary.events import EXCHANGE, SETUP_MEETINGS, SETUP_REPLICAS
from ..format.rows import StepRow
from ..read.timeline_reader import RankTimeline

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

"""The critical batch that `fd.noise_scale` measured in a run. Definition: `docs/batch-size.md`."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.vocabulary.events import SETUP_CRITICAL_BATCH, SETUP_CRITICAL_HIGH, SETUP_CRITICAL_LOW
from ..read.timeline_reader import RankTimeline


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

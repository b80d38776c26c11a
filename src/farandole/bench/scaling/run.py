"""What one run of a script tells the scaling benchmark: read from the records of all its ranks."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import DataError
from ...observe.figures.figures import standard_deviation, throughput
from ...observe.figures.step_parts import shares_of, step_parts
from ...observe.read.run_reader import read_run
from ...observe.read.timeline_reader import RankTimeline
from ..measure.warmup_detection import settle


@dataclass(frozen=True)
class MeasuredRun:
    """One run. Times in seconds; after warm-up but for `training_seconds`. None: not known."""

    ranks: int
    step_seconds: list[float]
    """Each step's time: its slowest rank's."""
    rates: list[float]
    """Samples of all ranks a second, by step; empty when samples are unknown."""
    training_seconds: float
    steps: int
    warm_up_steps: int
    steady: bool
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the step time of all ranks: compute, communication (exposed), waiting, data."""
    load_deviation: float | None = None
    """Standard deviation of the ranks' mean compute over their mean."""
    busy_cores: float | None = None
    """Cores a rank kept busy."""
    accelerator_share: float | None = None
    resident_bytes: int | None = None
    """The most of any rank."""

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def read_measured(run_directory: Path) -> MeasuredRun:
    """Read a finished run. Raises `DataError` when it has no steps that all ranks have recorded."""
    records = read_run(run_directory)
    timelines = [timeline for timeline in records.timelines if timeline.steps]
    size = int(records.facts.get("size") or len(records.timelines))
    if not timelines or len(timelines) < size:
        why = f" ({records.notes[0]})" if records.notes else ""
        raise DataError(
            f"{len(timelines)} of {size} ranks recorded steps{why}",
            remedy="the script must train with fd.distribute, or use fd.record",
        )
    steps = min(len(timeline.steps) for timeline in timelines)
    times = [max(t.steps[i].end_seconds - t.steps[i].begin_seconds for t in timelines) for i in range(steps)]
    settled = settle(times)
    cut = settled.warm_up
    samples = [sum(timeline.steps[i].samples for timeline in timelines) for i in range(steps)]
    parts = [own[cut:steps] for own in step_parts(timelines)]
    every = [part for own in parts for part in own]
    computes = [statistics.fmean(part.busy for part in own) for own in parts]
    return MeasuredRun(
        ranks=len(timelines),
        step_seconds=times[cut:],
        rates=[throughput(n, s) for n, s in zip(samples[cut:], times[cut:], strict=True)] if any(samples) else [],
        training_seconds=max(t.steps[-1].end_seconds - t.steps[0].begin_seconds for t in timelines),
        steps=steps,
        warm_up_steps=cut,
        steady=settled.steady,
        shares=shares_of(every),
        load_deviation=standard_deviation(computes) / statistics.fmean(computes) if any(computes) else None,
        busy_cores=_mean(timelines, "process_cores"),
        accelerator_share=_mean(timelines, "gpu_share"),
        resident_bytes=max(_known(timelines, "resident_bytes"), default=None),
    )


def _known(timelines: list[RankTimeline], attribute: str) -> list[Any]:
    values = [getattr(sample, attribute) for timeline in timelines for sample in timeline.samples]
    return [value for value in values if value is not None]


def _mean(timelines: list[RankTimeline], attribute: str) -> float | None:
    values = _known(timelines, attribute)
    return statistics.fmean(values) if values else None

"""Which global batch reaches a loss first: the step at each size, times the steps that it needs.

[Note: time to a loss] Throughput grows with the batch as long as communication is exposed, and beyond it as long
as a step has a fixed part. Time to a loss does not: the number of steps falls by 1 + B_noise / B, above B_noise
hardly at all. So what is compared is seconds(B) x (1 + B_noise / B). Between batches that are equally good within
`TOLERANCE`, the smallest is recommended: it needs the fewest samples. What a lossy codec costs in steps is not
known here, so each codec has its own best batch, and the one in use is recommended.

[Note: hiding communication] What is exchanged does not depend on the batch, and what is computed grows with it. So
the exposed share of a step falls while the batch grows, and there is a smallest batch at which it is below a
limit. It is found by doubling, then by bisection: about 2 log2(batch) predictions. What a larger batch
never hides is the exchange of the gradients that are ready last: it becomes small beside a long step, not zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...core.vocabulary.errors import ConfigError
from .critical import relative_samples, relative_steps, require_critical_batch
from .step_times import StepTime, StepTimes


# The smallest global batch at which communication hides behind computation.
def hiding_batch(times: StepTimes, *, multiple: int, most: int, exposed_share: float) -> StepTime | None:
    """Return the step at the smallest batch whose exposed share is at most `exposed_share`.

    See [Note: hiding communication].

    Args:
        times: predicts a step; its exposed share must not grow with the batch.
        multiple: the batch is a multiple of it: the ranks, times the micro-batches of a step.
        most: the largest batch to look at, in samples.
        exposed_share: of the step, above 0 and below 1.

    Returns:
        The step; None if no batch up to `most`, that fits into the memory, hides so much.
    """
    top = most // multiple
    low, high = 0, min(1, top)  # in multiples; at `low` it neither hides nor is too large
    found = None
    while high > low:
        found = times(high * multiple)
        if _is_enough(found, exposed_share):
            break
        low, high = high, min(2 * high, top)
    if found is None or not _is_enough(found, exposed_share):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        tried = times(middle * multiple)
        if _is_enough(tried, exposed_share):
            high, found = middle, tried
        else:
            low = middle
    return found if found.fits else None


def _is_enough(step: StepTime, exposed_share: float) -> bool:
    """Return whether communication hides, or the batch does not fit: no larger one is of interest."""
    return not step.fits or step.exposed_share <= exposed_share


EXPOSED_SHARE = 0.05
"""From this share of the step on, communication does not count as hidden."""
TOLERANCE = 0.02
"""Times to a loss that differ by less are the same."""
MOST_SAMPLES = 2**24
"""The largest batch that is looked at, where memory sets no limit."""


@dataclass(frozen=True)
class BatchQuestion:
    """What is asked."""

    ranks: int
    """Ranks that divide the batch."""
    current: int | None = None
    """The global batch in use, in samples; None: none is."""
    critical_batch: float | None = None
    """B_noise, in samples; None: not measured."""
    multiple: int = 0
    """The batch is a multiple of it; 0: of the ranks."""
    most: int = MOST_SAMPLES
    exposed_share: float = EXPOSED_SHARE

    def __post_init__(self) -> None:
        """Refuse what is no question."""
        require_critical_batch(self.critical_batch)
        if not 0 < self.exposed_share < 1:
            raise ConfigError(f"exposed share {self.exposed_share:g}: expected above 0 and below 1")
        for name, value, least in (
            ("ranks", self.ranks, 1),
            ("multiple", self.multiple, 0),
            ("most", self.most, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} = {value}: expected at least {least}")
        if self.current is not None and self.current < 1:
            raise ConfigError(f"global batch {self.current}: expected at least 1 sample")


@dataclass(frozen=True)
class BatchPoint:
    """One batch with one codec. What the critical batch says is None where that is not known."""

    codec: str
    global_batch: int
    seconds: float
    """A step takes so long."""
    exposed_share: float
    samples_per_second: float
    steps: float | None
    """Over the fewest."""
    samples: float | None
    """Over the fewest."""
    time_to_loss: float | None
    """Over that of the best point; filled when all points are known."""


@dataclass(frozen=True)
class BatchAdvice:
    """The answer."""

    question: BatchQuestion
    hiding: Mapping[str, int | None]
    """By codec: the smallest global batch at which communication hides; None: there is none."""
    points: Sequence[BatchPoint]
    """By codec, then by batch."""
    best: Mapping[str, BatchPoint]
    """By codec: what reaches a loss first; empty where the critical batch is not known."""
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def recommended(self) -> BatchPoint | None:
        """The best with the codec in use; None where the critical batch is not known."""
        return next(iter(self.best.values()), None)

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        recommended = self.recommended
        return {"version": 1, **asdict(self), "recommended": None if recommended is None else asdict(recommended)}


def advise(times: Mapping[str, StepTimes], question: BatchQuestion, notes: Sequence[str] = ()) -> BatchAdvice:
    """Return which batch to take. See [Note: time to a loss].

    Args:
        times: by codec, what predicts a step; the first is what is used now, or the exact exchange.
        question: ranks, batch and critical batch.
        notes: what is not known about the predictions, for the answer.
    """
    multiple = question.multiple or question.ranks
    hiding: dict[str, int | None] = {}
    points: list[BatchPoint] = []
    for codec, step in times.items():
        found = hiding_batch(step, multiple=multiple, most=question.most, exposed_share=question.exposed_share)
        hiding[codec] = None if found is None else found.global_batch
        own = [step(batch) for batch in _sizes(question, multiple, hiding[codec])]
        points += [_point(codec, each, question.critical_batch) for each in own if each.fits]
    known = [each.time_to_loss for each in points if each.time_to_loss is not None]
    if not known:
        return BatchAdvice(question, hiding, points, {}, notes)
    least = min(known)
    points = [replace(each, time_to_loss=(each.time_to_loss or 0.0) / least) for each in points]
    best = {codec: _best([each for each in points if each.codec == codec]) for codec in times}
    return BatchAdvice(question, hiding, points, {name: each for name, each in best.items() if each}, notes)


def _best(points: Sequence[BatchPoint]) -> BatchPoint | None:
    """Return the smallest batch that is as good as any of one codec's; None without a point."""
    times = [each.time_to_loss or 0.0 for each in points]
    good = [each for each, time in zip(points, times, strict=True) if time <= (1 + TOLERANCE) * min(times)]
    return good[0] if good else None


def _point(codec: str, step: StepTime, critical: float | None) -> BatchPoint:
    batch = step.global_batch
    steps = None if critical is None else relative_steps(batch, critical)
    samples = None if critical is None else relative_samples(batch, critical)
    time = None if steps is None else step.seconds * steps
    return BatchPoint(
        codec, batch, step.seconds, step.exposed_share, step.samples_per_second, steps, samples, time
    )


def _sizes(question: BatchQuestion, multiple: int, hiding: int | None) -> list[int]:
    """Return the batches of the table: the one in use by powers of two, the one that hides, the critical one."""
    most = question.most // multiple
    middle = question.current or hiding or multiple
    wanted = [middle * 2.0**power for power in range(-2, 4)]
    wanted += [float(each) for each in (hiding, question.critical_batch) if each]
    return sorted({multiple * min(most, max(1, round(each / multiple))) for each in wanted} - {0})

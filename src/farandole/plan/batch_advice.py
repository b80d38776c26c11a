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

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ..core.cluster import Cluster
from ..core.step_model import MeasuredStep
from ..core.vocabulary.codec_spec import NONE
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.text import in_columns
from ..core.vocabulary.units import format_rate, format_seconds
from .candidate import Candidate, Term
from .cost.layout import RunLayout
from .cost.predict import CostModel, fits
from .profile import ModelProfile


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


# What a batch size costs in steps and in samples, by the critical batch size.
#
# [Note: the critical batch] Steps and samples until a loss is reached, relative to the fewest of each:
#
#     steps(B)   = 1 + B_noise / B         many small steps, each with a noisy gradient
#     samples(B) = 1 + B / B_noise         few large steps, which average what was known already
#
# At B = B_noise both are twice the minimum. Source: McCandlish, Kaplan, Amodei et al., "An Empirical Model of
# Large-Batch Training", 2018, equation 2.11, with B_noise the simple noise scale tr(Sigma) / |G|^2 of equation
# 2.9. It holds for a learning rate that is tuned to each batch size, and B_noise grows while the loss falls.


def relative_steps(batch: float, critical_batch: float) -> float:
    """Return the steps to a loss over the fewest there can be: 1 + B_noise / B. Both in samples, above 0.

    >>> relative_steps(1000, 1000)
    2.0
    """
    return 1.0 + critical_batch / batch


def relative_samples(batch: float, critical_batch: float) -> float:
    """Return the samples to a loss over the fewest there can be: 1 + B / B_noise. Both in samples, above 0.

    >>> relative_samples(3000, 1000)
    4.0
    """
    return 1.0 + batch / critical_batch


def require_critical_batch(value: float | None) -> float | None:
    """Return `value`; raise `ConfigError` if it is no number of samples above 0. None: it was not measured."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"critical batch {value:g}: expected a number of samples above 0",
            remedy="measure it with fd.noise_scale over more steps, or leave it out",
        )
    return value


# How long a step takes at a batch size: the type that the search asks, whatever predicts it.


@dataclass(frozen=True)
class StepTime:
    """A step at one global batch."""

    global_batch: int
    """Samples, over all ranks."""
    seconds: float
    exposed_seconds: float
    """The part of `seconds` that is communication that no computation hides."""
    fits: bool = True
    """Whether it fits into the memory of a rank."""

    @property
    def exposed_share(self) -> float:
        """Share of the step that is exposed communication, 0 to 1."""
        return self.exposed_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput of all ranks."""
        return self.global_batch / self.seconds


StepTimes = Callable[[int], StepTime]
"""From a global batch, in samples, to its step."""


# The batch size for the link of a run that was recorded.


def advise_run(step: MeasuredStep, *, critical_batch: float | None = None) -> BatchAdvice:
    """Return which batch a run should take.

    `critical_batch`: in samples, instead of what the run measured itself. Raises `ConfigError` if it is not
    above 0.
    """
    critical = step.critical_batch if critical_batch is None else critical_batch
    question = BatchQuestion(ranks=step.ranks, current=step.global_batch, critical_batch=critical)
    times = {codec: partial(_time_of_run, step, codec) for codec in step.ratios}
    return advise(times, question, step.notes)


def _time_of_run(step: MeasuredStep, codec: str, global_batch: int) -> StepTime:
    seconds, exposed = step.at(global_batch, codec)
    return StepTime(global_batch, seconds, exposed)


# The batch size for a plan that was not run: by the predictor, from a profile and a cluster.


HIDEABLE: tuple[Term, ...] = ("data", "shard", "codec")
"""Exchanges that do not grow with the batch: those of gradients and parameters."""


def advise_plan(
    profile: ModelProfile,
    cluster: Cluster,
    candidate: Candidate,
    *,
    critical_batch: float | None = None,
    allow_lossy: bool = False,
) -> BatchAdvice:
    """Return which global batch the links of `cluster` ask for, with the plan of `candidate`.

    Args:
        profile: the model.
        cluster: the machines.
        candidate: plan, ranks, and the batch in use.
        critical_batch: in samples, as `fd.noise_scale` measured it; None: not known.
        allow_lossy: look at the codecs that the cluster has figures of, too.

    Raises:
        PlanError: `candidate` cannot be predicted.
        ConfigError: `critical_batch` is not above 0.
    """
    model = CostModel(profile, cluster)
    layout = RunLayout.of(candidate, cluster.tiers[0].ranks, on_device=not cluster.on_cpus)
    now = model.predict(candidate)
    question = BatchQuestion(
        ranks=candidate.ranks,
        current=candidate.global_batch,
        critical_batch=critical_batch,
        multiple=layout.sample_ranks * layout.passes,
    )
    times: dict[str, StepTimes] = {candidate.plan.codec: partial(_time, model, candidate)}
    if allow_lossy and candidate.plan.codec == NONE:
        # Beside shards, what a codec costs an accelerator is not known.
        known = cluster.codecs if cluster.on_cpus or not candidate.plan.zero else ()
        for codec in filter(cluster.knows_codec, known):
            other = _with_codec(model, candidate, codec)
            if other is not None:
                times[codec] = partial(_time, model, other)
    return advise(times, question, now.warnings)


def _with_codec(model: CostModel, candidate: Candidate, codec: str) -> Candidate | None:
    """Return the candidate with another codec; None if its plan cannot have it."""
    try:
        other = replace(candidate, plan=replace(candidate.plan, codec=codec))
        model.predict(other)
    except PlanError:
        return None
    return other


def _time(model: CostModel, candidate: Candidate, global_batch: int) -> StepTime:
    found = model.predict(replace(candidate, global_batch=global_batch))
    exposed = sum(found.terms.get(name, 0.0) for name in HIDEABLE)
    return StepTime(global_batch, found.seconds, exposed, fits=fits(found, model.cluster))


# The answer about batch sizes as text, at most 100 columns wide.


_HEAD: tuple[str, ...] = ("codec", "batch", "step", "exposed", "samples/s", "steps", "samples", "time to loss", "")
COLUMNS = 100


def to_text(advice: BatchAdvice) -> str:
    """Return the answer to be read; of codecs that are not in use, the batches of interest alone."""
    question = advice.question
    lines = [f"communication hides (at most {question.exposed_share:.0%} of a step is exposed) from a batch of"]
    for codec, batch in advice.hiding.items():
        text = (
            "no batch that fits" if batch is None else f"{batch:,} samples ({batch / question.ranks:,.4g} a rank)"
        )
        lines.append(f"  {codec:<20} {text}")
    lines += ["", *_table(advice), "", *_verdict(advice)]
    for note in advice.notes:
        lines += textwrap.wrap(f"note: {note}", COLUMNS, subsequent_indent="  ")
    return "\n".join(lines)


def _table(advice: BatchAdvice) -> list[str]:
    first = next(iter(advice.hiding), "")
    rows = [_HEAD]
    rows += [_row(each, advice) for each in advice.points if each.codec == first or _marks(each, advice)]
    return in_columns(rows, left=(0, len(_HEAD) - 1))


def _marks(point: BatchPoint, advice: BatchAdvice) -> list[str]:
    found = {
        "best": point == advice.best.get(point.codec),
        "hides": point.global_batch == advice.hiding[point.codec],
        "now": point.global_batch == advice.question.current,
    }
    return [name for name, is_so in found.items() if is_so]


def _row(point: BatchPoint, advice: BatchAdvice) -> tuple[str, ...]:
    relative = [
        "" if each is None else f"{each:.3g}x" for each in (point.steps, point.samples, point.time_to_loss)
    ]
    return (
        point.codec, f"{point.global_batch:,}", format_seconds(point.seconds), f"{point.exposed_share:.0%}",
        format_rate(point.samples_per_second), *relative, ", ".join(_marks(point, advice)),
    )  # fmt: skip


def _verdict(advice: BatchAdvice) -> list[str]:
    critical, best = advice.question.critical_batch, advice.recommended
    if critical is None or best is None:
        return [
            "The critical batch is not known, so nothing says what a larger batch is worth.",
            "Measure it during a run: noise = fd.noise_scale(model).",
        ]
    lines = [
        f"The critical batch is {critical:,.0f} samples: there, a loss takes twice the fewest steps and samples.",
        f"Shortest time to a loss with codec {best.codec}: {best.global_batch:,} samples a step, with "
        f"{best.steps:.3g}x the fewest",
        f"steps and {best.samples:.3g}x the fewest samples.",
    ]
    hides = advice.hiding[best.codec]
    if hides is not None and hides > best.global_batch:
        lines.append(
            f"At {hides:,} samples communication hides, and {relative_samples(hides, critical):.3g}x the fewest "
            "samples are needed."
        )
    others = [each for each in advice.best.values() if (each.time_to_loss or 0) < 0.98 * (best.time_to_loss or 0)]
    if others:
        least = min(others, key=lambda each: each.time_to_loss or 0.0)
        saved = 1 - (least.time_to_loss or 0.0) / (best.time_to_loss or 1.0)
        lines.append(
            f"Codec {least.codec} with {least.global_batch:,} samples a step would take {saved:.0%} less time, "
            "if it needs no more steps."
        )
    return lines

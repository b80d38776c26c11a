"""The answer about batch sizes as text, at most 100 columns wide."""

from __future__ import annotations

import textwrap

from ...core.vocabulary.units import format_rate, format_seconds
from .advice import BatchAdvice, BatchPoint
from .critical import relative_samples

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
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells, row[-1]]).rstrip())
    return lines


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

"""Loss, throughput, memory and utilisation over the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from ..figures.summary import weighted_loss
from ..records.rows import StepRow, ThinnedRow
from ..records.timeline_reader import RankTimeline
from .charts import Axes, Line, Point, line_chart
from .content import Block, Chart, Charts, Run, Section, number_of

BINS = 100
GB = 1e9
PERCENT = 0.01
LEAST_SECONDS = 10.0
"""A shorter run has a handful of points of throughput and memory, which show nothing but noise."""

MOST_METRICS = 24


def make(run: Run) -> Section | None:
    """Return the curves that there is anything to draw for; rank 0's metrics stand in for events."""
    legend = [("mine", "this run"), ("other", "one process")] if run.baseline else []
    is_long = _seconds_of(run) >= LEAST_SECONDS
    charts = [
        Chart("Loss", _loss(run), legend, _not_numbers(run)),
        *(Chart(name, svg) for name, svg in _all_logged(run.logged)[:MOST_METRICS]),
        Chart("Throughput", _throughput(run) if is_long else Markup(""), legend),
        *(
            Chart(title, _samples(run, name, fact, unit) if is_long else Markup(""), note=note)
            for title, name, fact, unit, note in (
                ("Memory of a process", "GB", "resident_bytes", GB, ""),
                ("Memory left on the machine", "GB", "available_bytes", GB, ""),
                ("CPU use of a rank", "cores", "process_cores", 1, "All threads of the process."),
                ("CPU use of the machine", "% of all cores", "machine_share", PERCENT, ""),
                ("Accelerator use", "% of the time", "gpu_share", PERCENT, ""),
                ("Accelerator memory", "GB", "gpu_used_bytes", GB, ""),
            )
        ),
    ]
    drawn = [chart for chart in charts if chart.svg]
    if not drawn:
        return None
    blocks: list[Block] = [Charts(drawn)]
    lead = ""
    if not run.timelines:
        lead = "From rank 0's metrics alone: the events of the ranks cannot be read."
    elif len(run.timelines) > 1 and any(timeline.samples for timeline in run.timelines):
        lead = "Lines of memory and use are means over the ranks; the band reaches from the lowest to the highest."
    return Section("curves", "Curves", blocks, lead)


def _seconds_of(run: Run) -> float:
    """Return how long the run trained; a run without events counts as long."""
    rows: list[StepRow | ThinnedRow] = [row for timeline in run.timelines for row in timeline.steps]
    rows += [row for timeline in run.timelines for row in timeline.thinned]
    if not rows:
        return math.inf
    return max(row.end_seconds for row in rows) - min(row.begin_seconds for row in rows)


def _loss(run: Run) -> Markup:
    own = losses(run.timelines) if run.timelines else _metric(run, "loss")
    other = losses(run.baseline) if run.baseline else []
    return _chart(own, other, Axes("step", "loss", from_zero=False))


def _throughput(run: Run) -> Markup:
    if not run.timelines:
        return _chart(_metric(run, "samples_per_second"), [], Axes("step", "samples/s"))
    axes = Axes("seconds", "samples/s" if not run.missing_ranks else "samples/s, at least", whole_x=False)
    return _chart(rates(run.timelines), rates(run.baseline), axes)


def _chart(own: Sequence[Point], other: Sequence[Point], axes: Axes) -> Markup:
    lines = [Line("one process", other, "other")] if other else []
    return line_chart([*lines, Line("this run", own, "mine")], axes)


def _logged(points: Sequence[Point]) -> Markup:
    """Draw a metric of the script's own; one value is no curve."""
    return _chart(points, [], Axes("step", "", from_zero=False)) if len(points) > 1 else Markup("")


def _all_logged(logged: Mapping[str, Sequence[Point]]) -> list[tuple[str, Markup]]:
    """Draw each metric, and the shares of the experts of a layer (``experts/LAYER/share/0``, ...) as one."""
    shares: dict[str, list[Line]] = {}
    drawn: list[tuple[str, Markup]] = []
    for name, points in logged.items():
        layer, _, expert = name.rpartition("/share/")
        if layer.startswith("experts/") and expert.isdigit():
            shares.setdefault(f"{layer}/share", []).append(Line(f"expert {expert}", points, "mine"))
        else:
            drawn.append((name, _logged(points)))
    return drawn + [(name, line_chart(lines, Axes("step", "share of choices"))) for name, lines in shares.items()]


def _metric(run: Run, key: str) -> list[Point]:
    return [(float(row["step"]), number_of(row, key)) for row in run.metrics]


def losses(timelines: Sequence[RankTimeline]) -> list[Point]:
    """Return the loss over steps, the mean over the ranks by samples."""
    by_step: dict[int, list[tuple[float, int]]] = {}
    for timeline in timelines:
        for row in timeline.steps:
            if row.loss is not None:
                by_step.setdefault(row.step, []).append((row.loss, row.samples))
    return [(float(step), weighted_loss(by_step[step])) for step in sorted(by_step)]


def _not_numbers(run: Run) -> str:
    own = losses(run.timelines) if run.timelines else []
    bad = [step for step, loss in own if not math.isfinite(loss)]
    return f"Not a number in {len(bad)} steps, first in step {bad[0]:.0f}." if bad else ""


def rates(timelines: Sequence[RankTimeline]) -> list[Point]:
    """Return samples/s of all ranks together over the seconds since the start, each rank as long as it went.

    Time is cut into equal pieces; a step's samples are spread evenly over its time.
    """
    # The first step of a rank is warm-up; sums of steps without a row of their own count as evenly spread.
    rows: list[StepRow | ThinnedRow] = [row for timeline in timelines for row in timeline.steps[1:]]
    rows += [row for timeline in timelines for row in timeline.thinned]
    if not rows or not any(row.samples for row in rows):
        return []
    zero = min(timeline.steps[0].begin_seconds for timeline in timelines)
    begin, end = min(row.begin_seconds for row in rows), max(row.end_seconds for row in rows)
    count = max(1, min(BINS, max(len(timeline.steps) for timeline in timelines) // 2))
    width = (end - begin) / count
    if not width > 0:
        return []
    bins = [0.0] * count
    for row in rows:
        length = row.end_seconds - row.begin_seconds
        if length <= 0:
            continue
        first = int((row.begin_seconds - begin) / width)
        last = min(count - 1, int((row.end_seconds - begin) / width))
        for i in range(first, last + 1):
            low, high = begin + i * width, begin + (i + 1) * width
            bins[i] += row.samples * max(0.0, min(high, row.end_seconds) - max(low, row.begin_seconds)) / length
    return [(begin - zero + (i + 0.5) * width, found / width) for i, found in enumerate(bins)]


def _samples(run: Run, name: str, fact: str, unit: float) -> Markup:
    """Draw a fact of the host's samples: the mean over the ranks, and a band from the lowest to the highest."""
    zero = run.begin_seconds if run.one_clock else None
    points: list[tuple[float, float]] = []
    for timeline in run.timelines:
        start = timeline.steps[0].begin_seconds if zero is None else zero
        known = [(sample.at_seconds, getattr(sample, fact)) for sample in timeline.samples]
        points += [(at - start, value / unit) for at, value in known if value is not None]
    if len(points) < 2:
        return Markup("")
    points.sort()
    begin, end = points[0][0], points[-1][0]
    longest = max(len(timeline.samples) for timeline in run.timelines)
    count = max(1, min(BINS, longest))
    bins: list[list[float]] = [[] for _ in range(count)]
    for at, value in points:
        bins[min(count - 1, int((at - begin) / (end - begin) * count)) if end > begin else 0].append(value)
    middles = [begin + (i + 0.5) * (end - begin) / count for i in range(count)]
    kept = [(at, own) for at, own in zip(middles, bins, strict=True) if own]
    line = [(at, sum(own) / len(own)) for at, own in kept]
    band = [(at, min(own), max(own)) for at, own in kept] if len(run.timelines) > 1 else []
    return line_chart([Line("mean", line, "mine", band=band)], Axes("seconds", name, whole_x=False))

"""The answer as one HTML page: a single file without references to anything outside of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from ..core.schedule import build_schedule
from ..core.schedule_simulation import (
    BatchesInARow,
    Schedule,
    Simulation,
    StageTimes,
    draw_grid,
    draw_svg,
    in_flight,
    simulate,
)
from ..core.vocabulary.degrees import Degrees, degrees_of
from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.units import format_bytes, format_rate, format_seconds, format_share
from ..version import VERSION
from .answer import change_text, interval_text, term_rows
from .memory import MemoryByCategory
from .search.reasons import CATEGORIES, in_words
from .search.refine import passes_of
from .search.result import DrawnPlan, PlanAnswer, PredictedPlan

# The drawings of the page, as inline SVG and HTML: labels keep their size, shapes stretch to the width.

WIDTH, HEIGHT = 1000, 340
_MARGIN = 0.04
_ROUND = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))
_FEWEST = 3
"""Labels of an axis."""
MOST_HOSTS = 12
MOST_ROWS = 16
COLORS = 8
"""Classes ``c0`` to ``c7`` of the style sheet."""


class Axis(NamedTuple):
    """A logarithmic axis."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high end."""
        if self.high <= self.low:
            return 0.5
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return _MARGIN + (1 - 2 * _MARGIN) * share

    def ticks(self) -> list[float]:
        """Return round values within it, some five of them."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        inside = [self.low]
        for steps in _ROUND:
            every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            inside = [value for value in every if self.low <= value <= self.high]
            if len(inside) >= _FEWEST:
                break
        return inside[:: max(1, len(inside) // 5)] or [self.low]


def frontier_chart(answer: PlanAnswer) -> Markup:
    """Return memory against time: a dot a plan, whose tooltip tells the plan, and the line of the frontier."""
    points = [point for point in answer.points if point.seconds > 0 and point.peak_bytes > 0]
    edge = [_point(option) for option in answer.frontier]
    every = [*points, *edge]
    if not every:
        return Markup("")
    across = _axis([*(each.peak_bytes for each in every), answer.limit_bytes])
    up = _axis([each.seconds for each in every])

    def place(point: DrawnPlan) -> tuple[float, float]:
        return WIDTH * across.share(point.peak_bytes), HEIGHT * (1 - up.share(point.seconds))

    limit = WIDTH * across.share(answer.limit_bytes)
    said = f"limit of memory: {format_bytes(answer.limit_bytes)}"
    parts = [f'<path class="limit" d="M{limit:.1f} 0V{HEIGHT}"><title>{escape(said)}</title></path>']
    parts += [f'<path class="grid" d="M0 {HEIGHT * (1 - up.share(value)):.1f}H{WIDTH}"/>' for value in up.ticks()]
    for point in points:
        style = "dot" if point.peak_bytes <= answer.limit_bytes else "dot over"
        parts.append(_plan_dot(style, place(point), point))
    if edge:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, edge))
        parts.append(f'<path class="edge" d="M{line}"/>')
        parts += [_plan_dot("dot best" if _is_best(answer, option) else "dot front", place(point), point)
                  for option, point in zip(answer.frontier, edge, strict=True)]  # fmt: skip
    if answer.best is not None and not any(_is_best(answer, option) for option in answer.frontier):
        best = _point(answer.best)
        parts.append(_plan_dot("dot best", place(best), best))
    return frame(
        "".join(parts),
        says=f"memory of a rank against the time of a step, {len(every)} plans",
        up=[(1 - up.share(value), format_seconds(value)) for value in up.ticks()],
        across=[(across.share(value), format_bytes(value)) for value in across.ticks()],
        names=("time of a step", "memory of a rank"),
    )


def bar(parts: Sequence[tuple[str, float]], whole: float, written: Iterable[str]) -> Markup:
    """Return one stacked bar, of which `whole` is the width; each part has a tooltip."""
    left, rects = 0.0, []
    for number, ((name, value), text) in enumerate(zip(parts, written, strict=True)):
        width = WIDTH * value / whole if whole else 0.0
        rects.append(
            f'<rect class="c{number % COLORS}" x="{left:.1f}" y="0" width="{width:.1f}" height="20">'
            f"<title>{escape(name)}: {escape(text)}</title></rect>"
        )
        left += width
    says = escape(", ".join(name for name, _ in parts))
    return Markup(
        f'<svg class="bar" viewBox="0 0 {WIDTH} 20" preserveAspectRatio="none" role="img" aria-label="{says}">'
        f"{''.join(rects)}</svg>"
    )


def breakdown(option: PredictedPlan) -> tuple[Markup, list[tuple[str, str, str]]]:
    """Return the bar of a step, and a row for each part of it: name, time, share."""
    terms = term_rows(option)
    seconds = sum(value for _, value in terms)
    rows = [(name, format_seconds(value), format_share(value / seconds)) for name, value in terms]
    return bar(terms, seconds, [f"{text}, {share}" for _, text, share in rows]), rows


def memory_bars(memory: Sequence[MemoryByCategory], limit_bytes: int) -> list[tuple[str, Markup, str]]:
    """Return a row for each stage: name, bar relative to the limit or the largest, total."""
    whole = max(limit_bytes, *(each.total_bytes for each in memory))
    rows = []
    for number, each in enumerate(memory[:MOST_ROWS]):
        parts = [(name, float(getattr(each, f"{name}_bytes") or 0)) for name in CATEGORIES]
        name = f"stage {number}" if len(memory) > 1 else "each rank"
        share = format_share(each.total_bytes / limit_bytes)
        drawn = bar(parts, whole, [format_bytes(value) for _, value in parts])
        rows.append((name, drawn, f"{format_bytes(each.total_bytes)}, {share}"))
    return rows


class Cell(NamedTuple):
    """A rank of the mesh."""

    rank: int
    color: int
    title: str


def mesh(degrees: Degrees, ranks_per_host: int) -> list[tuple[str, list[Cell]]]:
    """Return the first hosts with their ranks, coloured by what varies least often on a host."""
    hosts = []
    names = [name for name in ("pipeline", "data", "shard", "expert", "context", "tensor") if
             getattr(degrees, name) > 1]  # fmt: skip
    colored = "pipeline" if degrees.pipeline > 1 else names[-1] if names else "data"
    for first in range(0, min(degrees.size, MOST_HOSTS * ranks_per_host), ranks_per_host):
        cells = []
        for rank in range(first, min(first + ranks_per_host, degrees.size)):
            place = degrees.place(rank)
            said = ", ".join(f"{name} {place[name]} of {getattr(degrees, name)}" for name in names)
            cells.append(Cell(rank, place[colored] % COLORS, f"rank {rank}: {said}" if said else f"rank {rank}"))
        hosts.append((f"host {first // ranks_per_host}", cells))
    return hosts


def _axis(values: Sequence[float]) -> Axis:
    return Axis(min(values), max(values))


def _point(option: PredictedPlan) -> DrawnPlan:
    return DrawnPlan(in_words(option.candidate), option.prediction.seconds, option.prediction.peak_bytes)


def _is_best(answer: PlanAnswer, option: PredictedPlan) -> bool:
    return answer.best is not None and option.candidate == answer.best.candidate


def _plan_dot(style: str, place: tuple[float, float], point: DrawnPlan) -> str:
    return dot(style, place, f"{point.plan}: {format_seconds(point.seconds)}, {format_bytes(point.peak_bytes)}")


def dot(style: str, place: tuple[float, float], said: str) -> str:
    """Return a dot of the classes `style`, whose tooltip is `said`."""
    return f'<path class="{style}" d="M{place[0]:.1f} {place[1]:.1f}h.01"><title>{escape(said)}</title></path>'


def frame(
    drawing: str,
    *,
    says: str,
    up: Sequence[tuple[float, str]],
    across: Sequence[tuple[float, str]],
    names: tuple[str, str],
) -> Markup:
    """Return a drawing of `WIDTH` by `HEIGHT` with its labels: where each lies, from 0 to 1, and its text."""
    rows = "".join(f'<span style="top:{share:.2%}">{escape(text)}</span>' for share, text in up)
    columns = "".join(f'<span style="left:{share:.2%}">{escape(text)}</span>' for share, text in across)
    return Markup(
        f'<div class="frame"><div class="up-name">{escape(names[0])}</div>'
        f'<div class="up" aria-hidden="true">{rows}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(says)}">{drawing}</svg><div class="across" aria-hidden="true">{columns}</div>'
        f'<div class="across-name">{escape(names[1])}</div></div>'
    )


_MOST_DRAWN = 2400
"""Actions of a schedule that are drawn: of more micro-batches the first ones."""


def write_page(answer: PlanAnswer, path: Path, *, plan_name: str) -> None:
    """Write the page of an answer; raise `ConfigError` when it cannot be written."""
    try:
        path.write_text(render(answer, plan_name=plan_name), encoding="utf-8")
    except OSError as problem:
        raise ConfigError(
            f"cannot write {path}: {problem.strerror or problem}", remedy="choose another file with --html"
        ) from None


def render(answer: PlanAnswer, *, plan_name: str) -> str:
    """Return the page as text."""
    request = answer.request
    return fill(
        "answer.html.j2",
        title=plan_name,
        sentence=_sentence(answer),
        scope=f"{answer.model} on {answer.cluster}: {request.ranks} ranks, global batch {request.global_batch}, "
        f"goal {request.goal}",
        figures=_figures(answer),
        advice=answer.advice,
        frontier=frontier_chart(answer),
        best=_best(answer, answer.best) if answer.best is not None else None,
        families=[
            (each.name, each.status, in_words(each.option.candidate) if each.option else "", each.reason)
            for each in answer.families
        ],
        constraint=answer.constraint,
        next_bottleneck=answer.next_bottleneck,
        changes=[change_text(each) for each in answer.changes],
        trials=[
            (each.plan, "failed" if each.seconds is None else format_seconds(each.seconds),
             format_seconds(each.predicted_seconds), each.outcome)
            for each in answer.trials
        ],
        needs=answer.needs,
        warnings=answer.warnings,
        categories=CATEGORIES,
    )  # fmt: skip


def fill(template: str, **values: Any) -> str:
    """Return a page of this folder's `template`, with the style of all of them."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("farandole.plan", "."),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    style = Markup((Path(__file__).parent / "answer.css").read_text(encoding="utf-8"))
    page = environment.get_template(template).render(style=style, version=VERSION, **values)
    return page.encode("utf-8", "replace").decode("utf-8")


def _sentence(answer: PlanAnswer) -> str:
    if answer.best is None:
        return answer.advice[0] if answer.advice else "No plan fits"
    return f"{in_words(answer.best.candidate)}: {format_seconds(answer.best.prediction.seconds)} a step"


def _figures(answer: PlanAnswer) -> list[tuple[str, str, str]]:
    best = answer.best
    if best is None:
        return []
    prediction = best.prediction
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    return [
        ("step", format_seconds(prediction.seconds), f"{low} to {high}"),
        ("samples per second", format_rate(best.samples_per_second), f"on {best.candidate.ranks} ranks"),
        (
            "memory of a rank", format_bytes(prediction.peak_bytes),
            f"{format_share(prediction.peak_bytes / answer.limit_bytes)} of {format_bytes(answer.limit_bytes)}",
        ),
        ("sent by a rank", format_bytes(prediction.sent_bytes), "in a step"),
    ]  # fmt: skip


def _best(answer: PlanAnswer, best: PredictedPlan) -> dict[str, Any]:
    bar, rows = breakdown(best)
    plan = best.candidate.plan
    degrees = degrees_of(plan, best.candidate.ranks)
    inside = max(1, min(answer.ranks_per_host, best.candidate.ranks))
    hosts = -(-best.candidate.ranks // inside)
    return {
        "interval": interval_text(best),
        "bar": bar,
        "terms": rows,
        "memory": memory_bars(best.prediction.memory, answer.limit_bytes),
        "more_stages": max(0, len(best.prediction.memory) - MOST_ROWS),
        "hosts": mesh(degrees, inside),
        "more_hosts": max(0, hosts - MOST_HOSTS),
        "degrees": str(degrees),
        "schedule": _schedule(answer, best),
        "plan": plan.to_toml(),
    }


def _schedule(answer: PlanAnswer, best: PredictedPlan) -> tuple[Markup, str] | None:
    """Return the drawing of the pipeline's step, and a note; None without a pipeline."""
    plan, seconds = best.candidate.plan, answer.stage_seconds
    if plan.pipeline == 1 or not seconds:
        return None
    ranks, whole = int(plan.pipeline), passes_of(best.candidate)
    most = max(ranks, _MOST_DRAWN // (3 * len(seconds)) // ranks * ranks)
    count = min(whole, most)
    try:
        schedule = build_schedule(plan.schedule, ranks, count, plan.chunks)
    except PlanError:
        return None
    times = [StageTimes(forward, backward / 2, backward / 2) for forward, backward in seconds]
    drawn = draw_svg(simulate(schedule, times), title=f"{plan.schedule}, {count} micro-batches")
    note = f"The first {count} of {whole} micro-batches." if count < whole else ""
    return Markup(drawn.replace(' xmlns="http://www.w3.org/2000/svg"', "")), note


# The schedule of a plan's pipeline: simulated with equal stages, drawn, and its bubble and memory in flight.


MOST_ACTIONS = 200_000


@dataclass(frozen=True)
class PipelinePage:
    """A schedule and what it costs, with stages that take equally long."""

    schedule: Schedule
    simulation: Simulation
    batches: int = 1
    """That follow each other without a flush."""
    bubble_share: float = 0.0
    """The part of a step in which the busiest rank waits; of several batches, of each further one."""

    @property
    def title(self) -> str:
        """One line."""
        schedule = self.schedule
        return (
            f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {self._parts} "
            f"micro-batches; bubble {format_share(self.bubble_share)} of a step"
        )

    @property
    def _parts(self) -> str:
        count = self.schedule.micro_batches // self.batches
        return str(count) if self.batches == 1 else f"{self.batches} batches in a row of {count}"

    def to_text(self) -> str:
        """Return the page: a grid, and figures."""
        chunks = self.schedule.stages // self.schedule.ranks
        kept = ", ".join(map(str, in_flight(self.schedule)))
        return (
            f"{self.title}\n\n{draw_grid(self.simulation, unit_seconds=1.0 / chunks)}\n"
            f"activations of so many micro-batches are kept at once, by rank (in stages): {kept}\n"
            "forward and both parts of backward are taken as equally long, transfers as free\n"
        )

    def to_svg(self) -> str:
        """Return the drawing."""
        return draw_svg(self.simulation, title=self.title)

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values; times are in units of one forward pass of a rank."""
        return {
            "version": 1,
            "schedule": self.schedule.name,
            "ranks": self.schedule.ranks,
            "stage_ranks": list(self.schedule.stage_ranks),
            "micro_batches": self.schedule.micro_batches // self.batches,
            "batches": self.batches,
            "actions": [[str(action) for action in actions] for actions in self.schedule.actions],
            "in_flight": list(in_flight(self.schedule)),
            "bubble_share": self.bubble_share,
            "spans": [{**asdict(span), "action": str(span.action)} for span in self.simulation.spans],
        }


def pipeline_page(plan: Plan, micro_batches: int = 0) -> PipelinePage:
    """Return the schedule of `plan`; `micro_batches` instead of the plan's, if not 0.

    Raises `PlanError` when the plan has no pipeline of a known size, or its schedule does not fit.
    """
    if not isinstance(plan.pipeline, int) or plan.pipeline < 2:
        raise PlanError(
            f"plan: pipeline = {plan.pipeline!r}, and there is nothing to draw without a pipeline",
            remedy="set pipeline to a number of ranks from 2 on: --set pipeline=4",
        )
    count = micro_batches or plan.micro_batches or 2 * plan.pipeline
    if count < 1 or count * plan.pipeline * 6 > MOST_ACTIONS:
        raise PlanError(
            f"plan: {count} micro-batches on {plan.pipeline} ranks",
            remedy=f"draw at least one, and at most {MOST_ACTIONS // (6 * plan.pipeline)}",
        )
    if plan.weight_versions > 1:
        return _in_a_row(plan.pipeline, count)
    schedule = build_schedule(plan.schedule, plan.pipeline, count, plan.chunks)
    chunks = schedule.stages // schedule.ranks
    each = 1.0 / chunks
    simulation = simulate(schedule, [StageTimes(each, each, each)] * schedule.stages)
    return PipelinePage(schedule, simulation, bubble_share=simulation.bubble_share)


def _in_a_row(ranks: int, micro_batches: int) -> PipelinePage:
    """Return two batches without a flush between them; the bubble is that of a step once the pipeline is full."""
    rows, times = BatchesInARow(ranks, micro_batches), [StageTimes(1.0, 1.0, 1.0)] * ranks
    two, three = (simulate(rows.schedule(batches), times) for batches in (2, 3))
    step = three.total_seconds - two.total_seconds
    bubble = step - (max(three.busy_seconds) - max(two.busy_seconds))
    return PipelinePage(rows.schedule(2), two, 2, bubble / step)

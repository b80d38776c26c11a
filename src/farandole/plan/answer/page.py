"""The answer as one HTML page: a single file without references to anything outside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ...core.schedule.build import build_schedule
from ...core.schedule.draw import draw_svg
from ...core.schedule.simulate import StageTimes, simulate
from ...core.vocabulary.degrees import degrees_of
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.units import format_bytes, format_rate, format_seconds, format_share
from ...version import VERSION
from ..search.in_words import in_words
from ..search.reasons import CATEGORIES
from ..search.refine import passes_of
from ..search.result import PlanAnswer, PredictedPlan
from .charts import MOST_HOSTS, MOST_ROWS, breakdown, frontier_chart, memory_bars, mesh
from .text import change_text, interval_text

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
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("farandole.plan.answer", "."),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    request = answer.request
    page = environment.get_template("page.html.j2").render(
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
        style=Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8")),
        version=VERSION,
    )  # fmt: skip
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

"""From a run directory to the page: what to say, in words and numbers, and the file itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, DataError
from ...core.run_files import REPORT, RUN, write_private
from ...core.units import format_bytes, format_rate, format_seconds
from ...version import VERSION
from ..figures import median
from ..summary import (
    SHARES,
    RankFigures,
    StepParts,
    Summary,
    read_run,
    read_timelines,
    step_parts,
    summarise,
    weighted_loss,
)
from ..timeline import RankTimeline
from .charts import Bar, Line, line_chart, share_bars, stacked_area

NAMES = {
    "compute": "compute",
    "communication": "exposed communication",
    "waiting": "waiting for others",
    "data": "data loading",
}
STYLES = [f"part-{name}" for name in SHARES]


def write_report(run_directory: Path, output: Path | None = None, *, baseline: Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return where it is.

    Raises `DataError` when the directory is not a run's, `ConfigError` when the page cannot be written.
    """
    if not run_directory.is_dir():
        raise DataError(f"{run_directory} is not a run directory", remedy="name a directory below runs/")
    if not (run_directory / RUN).exists() and not any(run_directory.glob("events-rank*.jsonl")):
        raise DataError(f"{run_directory} holds nothing of a run", remedy=f"expected {RUN} or events-rank0.jsonl")
    page = render(run_directory, baseline)
    path = output if output is not None else run_directory / REPORT
    try:
        write_private(path, page)
    except OSError as problem:
        raise ConfigError(
            f"cannot write {path}: {problem.strerror or problem}", remedy="choose one with -o"
        ) from None
    return path


def render(run_directory: Path, baseline: Path | None) -> str:
    """Return the page as text."""
    import jinja2

    facts = read_run(run_directory)
    summary = summarise(run_directory, baseline=baseline)
    timelines, _ = read_timelines(run_directory, facts)
    timelines = [timeline for timeline in timelines if timeline.steps]
    other = _other_timelines(summary)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("farandole.observe.report", "."),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html.j2").render(
        title=run_directory.name,
        headline=headline(summary),
        failure=_failure(run_directory),
        figures=figures(summary),
        legend=[(style, NAMES[name]) for style, name in zip(STYLES, SHARES, strict=True)],
        by_rank=_by_rank(summary.ranks),
        over_time=_over_time(step_parts(timelines)) if timelines else "",
        loss=_loss_chart(timelines, other),
        throughput=_throughput_chart(timelines, other),
        compared=other is not None,
        ranks=[_rank_row(rank) for rank in summary.ranks],
        notes=summary.notes,
        plan=facts.get("plan") or {},
        environment=_environment(facts),
        version=VERSION,
    )


def headline(summary: Summary) -> str:
    """Return the run in one sentence."""
    ranks = f"{summary.size} rank{'s' * (summary.size != 1)}"
    if summary.training_seconds is None or summary.shares is None:
        return f"{ranks}: no step was recorded."
    text = f"{ranks}, {summary.steps} steps in {format_seconds(summary.training_seconds)}"
    if summary.samples_per_second is not None:
        text += f": {format_rate(summary.samples_per_second)} samples/s"
    if summary.comparison is not None:
        gain = summary.comparison
        text += f", {gain.speedup:.2f}x one process (efficiency {gain.efficiency:.2f})"
    name = max(SHARES[1:], key=lambda share: summary.shares[share] if summary.shares else 0.0)
    if summary.shares[name] < 0.005:
        return text + f". {summary.shares['compute']:.1%} of the time is compute."
    return text + f". {summary.shares[name]:.1%} of the time is {NAMES[name]}."


def figures(summary: Summary) -> list[tuple[str, str]]:
    """Return the closing figures as name and text; what is not known says so."""

    def show(value: float | None, text: Any) -> str:
        return "unknown" if value is None else text(value)

    gain = summary.comparison
    deviation = summary.compute_deviation_share
    return [
        ("training time", show(summary.training_seconds, format_seconds)),
        ("steps (of them warm-up)", f"{summary.steps} ({summary.warm_up_steps})"),
        ("samples/s", show(summary.samples_per_second, format_rate)),
        ("tokens/s", show(summary.tokens_per_second, format_rate)),
        ("step, median", show(summary.step_seconds, format_seconds)),
        ("speedup", "unknown" if gain is None else f"{gain.speedup:.2f}x one process"),
        ("efficiency", "unknown" if gain is None else f"{gain.efficiency:.2f}"),
        *(
            (NAMES[name], "unknown" if summary.shares is None else f"{summary.shares[name]:.1%}")
            for name in SHARES
        ),
        (
            "standard deviation of the ranks' compute",
            show(summary.compute_deviation_seconds, format_seconds)
            + ("" if deviation is None else f" ({deviation:.1%})"),
        ),
        ("sent by a rank in a step", show(summary.sent_bytes_per_step, format_bytes)),
        ("loss, first and last", f"{_loss(summary.first_loss)}, {_loss(summary.last_loss)}"),
    ]


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _by_rank(ranks: Sequence[RankFigures]) -> str:
    bars = []
    for rank in ranks[:64]:
        parts = [rank.shares[name] for name in SHARES]
        text = ", ".join(f"{NAMES[name]} {rank.shares[name]:.1%}" for name in SHARES)
        bars.append(Bar(f"rank {rank.rank}", parts, f"rank {rank.rank} on {rank.host}: {text}"))
    return share_bars(bars, STYLES) if bars else ""


def _over_time(parts: Sequence[Sequence[StepParts]]) -> str:
    """Stack the mean over the ranks of each part, in milliseconds, over the steps."""
    count = min(len(own) for own in parts)
    rows = [[own[i] for own in parts] for i in range(count)]
    # One slow first step would flatten all the rest.
    limit = 4 * median([part.seconds for row in rows for part in row])
    kept = [row for row in rows if max(part.seconds for part in row) <= limit]
    series = [[1e3 * sum(getattr(part, name) for part in row) / len(row) for row in kept] for name in SHARES]
    return stacked_area([row[0].step for row in kept], series, STYLES, y_name="ms a step")


def _other_timelines(summary: Summary) -> list[RankTimeline] | None:
    if summary.comparison is None:
        return None
    timelines, _ = read_timelines(Path(summary.comparison.baseline), {})
    return [timeline for timeline in timelines if timeline.steps]


def _loss_chart(timelines: Sequence[RankTimeline], other: Sequence[RankTimeline] | None) -> str:
    lines = [Line("one process", _losses(other), "other")] if other else []
    lines.append(Line("this run", _losses(timelines), "mine"))
    return line_chart(lines, x_name="step", y_name="loss", from_zero=False)


def _losses(timelines: Sequence[RankTimeline]) -> list[tuple[float, float]]:
    by_step: dict[int, list[tuple[float, int]]] = {}
    for timeline in timelines:
        for row in timeline.steps:
            if isinstance(row.loss, (int, float)):
                by_step.setdefault(row.step, []).append((row.loss, row.samples))
    return [(float(step), weighted_loss(by_step[step])) for step in sorted(by_step)]


def _throughput_chart(timelines: Sequence[RankTimeline], other: Sequence[RankTimeline] | None) -> str:
    lines = [Line("one process", _rates(other), "other")] if other else []
    lines.append(Line("this run", _rates(timelines), "mine"))
    return line_chart(lines, x_name="seconds", y_name="samples/s", from_zero=True)


def _rates(timelines: Sequence[RankTimeline]) -> list[tuple[float, float]]:
    """Return samples/s of all ranks together over the time since the start."""
    if not timelines:
        return []
    count = min(len(timeline.steps) for timeline in timelines)
    begin = min(timeline.steps[0].begin_seconds for timeline in timelines)
    points = []
    for i in range(1, count):
        rows = [timeline.steps[i] for timeline in timelines]
        seconds = max(row.end_seconds - row.begin_seconds for row in rows)
        samples = sum(row.samples for row in rows)
        if samples and seconds > 0:
            points.append((max(row.end_seconds for row in rows) - begin, samples / seconds))
    return points


def _rank_row(rank: RankFigures) -> dict[str, str]:
    return {
        "rank": str(rank.rank),
        "host": rank.host,
        "steps": str(rank.steps),
        "step": format_seconds(rank.step_seconds),
        "compute": format_seconds(rank.compute_seconds),
        "compute_share": f"{rank.shares['compute']:.1%}",
        **{name: f"{rank.shares[name]:.1%}" for name in SHARES[1:]},
    }


def _failure(run_directory: Path) -> dict[str, Any] | None:
    try:
        values = json.loads((run_directory / "failure.json").read_text(encoding="utf-8"))
        after = f" after step {values['step']}" if values["step"] else ""
        return {
            "line": f"Rank {values['rank']} on {values['host']} failed{after}: {values['cause']}",
            "traceback": values["traceback"],
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _environment(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts:
        return [("run.json", "missing or unreadable: the environment is unknown")]
    versions = facts.get("versions")
    rows = [
        ("command", " ".join(map(str, facts.get("command") or ["unknown"]))),
        ("started", str(facts.get("started", "unknown"))),
        ("hosts", ", ".join(map(str, facts.get("hosts") or ["unknown"]))),
        ("cores", str(facts.get("cores", "unknown"))),
        ("commit", str(facts.get("commit") or "none")),
    ]
    rows += [(str(name), str(value)) for name, value in versions.items()] if isinstance(versions, dict) else []
    return rows

"""Renders the page of a run: its head, the sections in order, the template, and the file."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.vocabulary.errors import ConfigError, DataError
from ...core.vocabulary.run_files import REPORT, write_asked
from ...core.vocabulary.units import format_rate, format_share
from ...version import VERSION
from ..diagnose.verdict import SAVING
from ..figures.inexact import few_steps
from ..figures.summary import describe_efficiency
from ..records.run_reader import why_ended
from . import curves, late, network, scaling, short_sections, step, timeline
from .content import Run, Section, number_of, plural, read, seconds

SECTIONS: Sequence[Callable[[Run], Section | None]] = (
    short_sections.make_fixes, step.make, late.make, timeline.make, curves.make, network.make,
    short_sections.make_tuning, short_sections.make_balance, scaling.make, short_sections.make_predicted,
    short_sections.make,
)  # fmt: skip
"""In reading order. Each takes a `Run` and gives a `Section`, or None where the run holds nothing for it."""


def make_sections(run: Run) -> list[Section]:
    """Return those sections for which the run holds something."""
    made = (make(run) for make in SECTIONS)
    return [section for section in made if section is not None]


def write_report(
    run_directory: Path,
    output: Path | None = None,
    *,
    baseline: Path | None = None,
    refresh_seconds: float | None = None,
) -> Path:
    """Write the report of a run, finished or not, and return where it is.

    With `refresh_seconds` the page asks the browser to load it again so often.
    Raises `DataError` when the directory is not a run's, `ConfigError` when the page cannot be written.
    """
    page = render(read(run_directory, baseline), refresh_seconds=refresh_seconds)
    path = output if output is not None else run_directory / REPORT
    write_asked(path, page, remedy="choose another file with -o")
    return path


def render(run: Run, *, refresh_seconds: float | None = None) -> str:
    """Return the page as text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("farandole.observe.report", "."),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    here = Path(__file__).parent
    first, saving = headline(run)
    text = environment.get_template("page.html.j2").render(
        title=run.directory.name or run.directory.resolve().name,
        sentence=first,
        saving=saving,
        scope=scope(run),
        figures=figures(run),
        failure=run.failure,
        notes=run.notes,
        sections=make_sections(run),
        style=(here / "page.css").read_text(encoding="utf-8"),
        script=(here / "page.js").read_text(encoding="utf-8"),
        refresh_seconds=refresh_seconds,
        version=VERSION,
    )
    # Names of files and hosts may hold bytes that are no text.
    return text.encode("utf-8", "replace").decode("utf-8")


# The report while the run goes on: written again every few seconds, until the run has ended.


def watch_report(
    run_directory: Path,
    output: Path | None = None,
    *,
    baseline: Path | None = None,
    every_seconds: float = 5.0,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the report now and every so often until the run has ended; return where it is.

    The page reloads itself meanwhile; the last one written does not, however the watching ends. `say` is told
    where the page is, once, and why the watching ended. Raises as `write_report`.
    """
    if not every_seconds >= 0.5:
        raise ConfigError(f"{every_seconds:g} seconds between two pages: expected at least 0.5")
    said = False
    try:
        while True:
            began = time.time()
            ended = why_ended(run_directory, began)
            if ended:
                break
            try:
                path = write_report(
                    run_directory, output, baseline=baseline, refresh_seconds=max(1.0, every_seconds)
                )
                if not said:
                    said = True
                    say(f"{path} is kept up to date; Ctrl-C ends it")
            except DataError:
                # A directory made a moment ago holds nothing yet.
                if not run_directory.is_dir() or said:
                    raise
            # A long run takes long to read: leave at least as much time to the run as reading took.
            time.sleep(max(every_seconds, time.time() - began))
    except KeyboardInterrupt:
        # The page may exist although its path was not printed yet.
        if (output if output is not None else run_directory / REPORT).exists():
            with contextlib.suppress(DataError):
                write_report(run_directory, output, baseline=baseline)
        raise
    path = write_report(run_directory, output, baseline=baseline)
    say(ended)
    return path


# The top of the page: the run in one sentence, and its main figures.


def headline(run: Run) -> tuple[str, str]:
    """Return the run in one sentence, as short as a heading, and what could be saved; empty: nothing is known."""
    text = sentence(run)
    what, mark, rest = text.partition(SAVING)
    return (f"{what}.", f"About {rest}") if mark else (text, "")


def sentence(run: Run) -> str:
    """Return the run in one sentence."""
    if not run.timelines:
        ranks = plural(run.summary.size, "rank") if run.summary.size else "A run of unknown size"
        return f"{ranks}: no step was recorded by farandole" + (
            "; the curves are rank 0's." if run.metrics else "."
        )
    return run.diagnosis.verdict


def scope(run: Run) -> str:
    """Return what the figures are of: ranks, steps and time."""
    summary = run.summary
    parts = [plural(summary.size, "rank")] if summary.size else []
    if run.timelines:
        parts.append(plural(summary.steps, "step"))
        parts.append(seconds(summary.training_seconds))
        hosts = len({timeline.started.host for timeline in run.timelines})
        parts.insert(1, plural(hosts, "host"))
    elif run.metrics:
        parts.append(plural(int(run.metrics[-1]["step"]), "step"))
    return ", ".join(parts)


def figures(run: Run) -> list[tuple[str, str, str]]:
    """Return name, value and a word on it. With ranks missing, sums are lower bounds and say so."""
    summary = run.summary
    if not run.timelines:
        return _from_metrics(run)
    missing = run.missing_ranks
    least = "at least " if missing else ""
    beside = f"{missing} of {summary.size} ranks not counted" if missing else ""
    few = few_steps(summary.counted_steps, summary.steps) or _after_warm_up(run)
    middle = f"median {seconds(summary.step_seconds)}" + (f"; {few}" if few else "")
    rows = [("step, mean", seconds(summary.mean_step_seconds), middle)]
    rate, token_rate = summary.samples_per_second, summary.tokens_per_second
    rows.append(("samples/s", "unknown" if rate is None else least + format_rate(rate), beside))
    if token_rate is not None:
        rows.append(("tokens/s", least + format_rate(token_rate), beside))
    whole, shares = summary.mean_step_seconds or math.nan, summary.shares or {}
    named = [
        ("communication", "exposed communication"),
        ("waiting", "waiting for others"),
        ("data", "data loading"),
    ]
    for name, title in named if summary.size > 1 else named[-1:]:
        share = shares.get(name)
        rows.append(
            (title, "unknown", "")
            if share is None
            else (title, format_share(share), f"{seconds(share * whole)} a step")
        )
    gain = summary.comparison
    if gain is not None:
        note = describe_efficiency(gain.efficiency) + (", at least" if missing else "")
        rows.append(("speedup", f"{least}{gain.speedup:.2f}x", note))
    if summary.last_loss is not None and summary.first_loss is not None:
        rows.append(("loss", f"{summary.last_loss:.4g}", f"from {summary.first_loss:.4g}"))
    return rows


def _after_warm_up(run: Run) -> str:
    count = run.summary.warm_up_steps
    return f"without {plural(count, 'warm-up step')}" if count else ""


def _from_metrics(run: Run) -> list[tuple[str, str, str]]:
    if not run.metrics:
        return []
    last = run.metrics[-1]
    rows = [("step", seconds(number_of(last, "seconds")), "the last recorded")]
    rate, loss = number_of(last, "samples_per_second"), number_of(last, "loss")
    if math.isfinite(rate):
        rows.append(("samples/s", format_rate(rate), "rank 0's, times the ranks"))
    if math.isfinite(loss):
        rows.append(("loss", f"{loss:.4g}", "rank 0's"))
    return rows

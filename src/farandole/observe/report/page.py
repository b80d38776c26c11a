"""Renders the page of a run: the sections in order, the template, and the file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.vocabulary.errors import ConfigError, DataError
from ...core.vocabulary.run_files import REPORT, write_private
from ...version import VERSION
from ..records.run_reader import why_ended
from . import curves, environment, late, network, scaling, step, timeline, verdict
from .content import Run, Section, read

SECTIONS: Sequence[Callable[[Run], Section | None]] = (
    environment.make_fixes,
    step.make,
    late.make,
    timeline.make,
    curves.make,
    network.make,
    environment.make_tuning,
    environment.make_balance,
    scaling.make,
    environment.make_predicted,
    environment.make,
)
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
    try:
        write_private(path, page)
    except OSError as problem:
        raise ConfigError(
            f"cannot write {path}: {problem.strerror or problem}", remedy="choose another file with -o"
        ) from None
    return path


def render(run: Run, *, refresh_seconds: float | None = None) -> str:
    """Return the page as text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("farandole.observe.report", "."),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    here = Path(__file__).parent
    sentence, saving = verdict.headline(run)
    text = environment.get_template("page.html.j2").render(
        title=run.directory.name or run.directory.resolve().name,
        sentence=sentence,
        saving=saving,
        scope=verdict.scope(run),
        figures=verdict.figures(run),
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

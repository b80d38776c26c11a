"""Renders the page of a run: the sections in order, the template, and the file."""

from __future__ import annotations

from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import REPORT, write_private
from ...version import VERSION
from .content.run import Run, read
from .sections import make_sections, verdict


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

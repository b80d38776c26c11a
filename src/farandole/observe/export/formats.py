"""The formats of other tools that a run is written in.

::

    export_run(Path("runs/first"), "chrome", None)      # runs/first/trace.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean
from .chrome import write_chrome
from .metrics import write_metrics
from .source import ExportSource, load
from .tensorboard import write_tensorboard


@dataclass(frozen=True)
class Format:
    """How one format is written, and what its output is called inside the run directory."""

    write: Callable[[ExportSource, Path], list[Path]]
    default: str


FORMATS = {
    "chrome": Format(write_chrome, "trace.json"),
    "tensorboard": Format(write_tensorboard, "tensorboard"),
    "prometheus": Format(partial(write_metrics, "prometheus_client.exposition"), "metrics.prom"),
    "openmetrics": Format(
        partial(write_metrics, "prometheus_client.openmetrics.exposition"), "metrics.openmetrics"
    ),
}


@dataclass(frozen=True)
class Exported:
    """What was written, and what the run's records do not have, in words."""

    files: list[Path]
    notes: list[str]


def export_run(
    run_directory: Path, name: str, out: Path | None, *, steps: tuple[int, int] | None = None
) -> Exported:
    """Write a run in the format `name` to `out`, or to its place in the run directory.

    With `steps`, only those from the first to the last given. Raises `ConfigError` for an unknown format, one
    whose package is missing, steps that the run does not have or a place that cannot be written, `DataError` for
    a run without records.
    """
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}", remedy=did_you_mean(name, FORMATS))
    records = load(run_directory, steps)
    chosen = FORMATS[name]
    return Exported(chosen.write(records, out or run_directory / chosen.default), records.notes)

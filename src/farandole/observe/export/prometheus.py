"""The figures of a run as text for Prometheus, for the node exporter's textfile collector, or as OpenMetrics."""

from __future__ import annotations

from pathlib import Path

from .extras import needed
from .metrics import RunCollector
from .output import write_bytes
from .source import ExportSource


def write_prometheus(records: ExportSource, out: Path) -> list[Path]:
    """Write the metrics to `out`, renamed into place as the collector wants it; return what was written."""
    return _write("prometheus_client.exposition", records, out)


def write_openmetrics(records: ExportSource, out: Path) -> list[Path]:
    """Write the metrics to `out` in the OpenMetrics text format; return what was written."""
    return _write("prometheus_client.openmetrics.exposition", records, out)


def _write(exposition: str, records: ExportSource, out: Path) -> list[Path]:
    text: bytes = needed(exposition, "prometheus", "this format").generate_latest(RunCollector(records))
    return [write_bytes(out, [text])]

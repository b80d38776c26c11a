"""The figures of a run in Prometheus' text format, for the node exporter's textfile collector."""

from __future__ import annotations

from pathlib import Path

from .metrics import COUNTER, INFO, Family, families, line
from .output import write_text
from .source import ExportSource

_TYPES = {INFO: "gauge"}


def write_prometheus(records: ExportSource, out: Path) -> list[Path]:
    """Write the metrics to `out`, renamed into place as the collector wants it; return what was written."""
    return [write_text(out, "".join(_text(family) for family in families(records)))]


def _text(family: Family) -> str:
    name = family.name + {COUNTER: "_total", INFO: "_info"}.get(family.kind, "")
    lines = [f"# HELP {name} {family.help}", f"# TYPE {name} {_TYPES.get(family.kind, family.kind)}"]
    # In this format counters and infos carry their suffix in the family's name, too.
    bare = family.name if family.kind == INFO else name
    return "\n".join([*lines, *(line(bare, point) for point in family.points)]) + "\n"

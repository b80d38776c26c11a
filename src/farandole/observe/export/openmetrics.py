"""The figures of a run in the OpenMetrics text format (version 1.0)."""

from __future__ import annotations

from pathlib import Path

from .metrics import COUNTER, Family, families, line
from .output import write_text
from .source import ExportSource


def write_openmetrics(records: ExportSource, out: Path) -> list[Path]:
    """Write the metrics to `out`; return what was written."""
    return [write_text(out, "".join(_text(family) for family in families(records)) + "# EOF\n")]


def _text(family: Family) -> str:
    lines = [f"# TYPE {family.name} {family.kind}"]
    if family.unit and family.name.endswith(f"_{family.unit}"):
        lines.append(f"# UNIT {family.name} {family.unit}")
    lines.append(f"# HELP {family.name} {family.help}")
    name = family.name + ("_total" if family.kind == COUNTER else "")
    return "\n".join([*lines, *(line(name, point) for point in family.points)]) + "\n"

"""The result of ``farandole bench codecs`` as a table."""

from __future__ import annotations

from typing import Any

from ..measure.table import format_table


def format_codecs(result: dict[str, Any]) -> str:
    """Return the result as a table, one for each device."""
    head = ["codec", "GB/s", "95 % interval", "sent / fp32", "relative error"]
    lines = []
    for device in dict.fromkeys(row["device"] for row in result["rows"]):
        here = [row for row in result["rows"] if row["device"] == device]
        lines.append(
            f"{device}: {here[0]['processor']}, {result['threads']} thread, {result['elements']} elements"
        )
        rows = [
            [
                row["codec"],
                f"{row['gigabytes_per_second']:.3g}",
                f"{row['interval'][0]:.3g} to {row['interval'][1]:.3g}",
                f"{row['ratio']:.4f}",
                f"{row['relative_error']:.2g}",
            ]
            for row in here
        ]
        lines.append(format_table(head, rows))
    return "\n".join(lines)

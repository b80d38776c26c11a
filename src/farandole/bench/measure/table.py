"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows below their head, first column to the left, the others to the right, no blanks at ends.

    >>> print(format_table(["a", "b"], [["x", "10"]]))
    a   b
    x  10
    """
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)

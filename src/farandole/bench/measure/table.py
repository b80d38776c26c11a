"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
"""What makes a text of a head and rows."""


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


def format_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Return the rows below their head as a table of Markdown, with a blank line before and after it.

    >>> print(format_markdown(["a", "b"], [["x", "1|0"]]).strip())
    | a | b |
    |---|--:|
    | x | 1\|0 |
    """
    rule = "|" + "|".join("--:" if i else "---" for i in range(len(head))) + "|"
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [head, *rows]]
    return "\n".join(["", lines[0], rule, *lines[1:], ""])

"""How the page writes quantities."""

from __future__ import annotations

import math

from ....core.vocabulary.units import format_seconds, format_share


def seconds(value: float | None) -> str:
    """Write a duration; what is not known says so."""
    return "unknown" if value is None or not math.isfinite(value) else format_seconds(value)


def milliseconds(value: float) -> str:
    """Write a duration in milliseconds with a fixed number of decimals, so that a column lines up."""
    if not math.isfinite(value):
        return "-"
    return f"{value * 1e3:,.1f}"


def percent(share: float) -> str:
    """Write a share with one decimal, so that a column lines up."""
    return format_share(share, decimals=1)


def plural(count: int, name: str) -> str:
    """Write a number of things.

    >>> plural(1, "rank"), plural(2000, "step")
    ('1 rank', '2,000 steps')
    """
    return f"{count:,} {name}{'s' * (count != 1)}"


def number(value: float) -> str:
    """Write a number with three figures."""
    return "unknown" if not math.isfinite(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

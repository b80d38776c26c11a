"""The blocks of a section, as plain data; only `page.html.j2` knows how they look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup

from ....core.vocabulary.units import format_bits_per_second, format_bytes, format_seconds, format_share
from ...figures.step_parts import StepParts
from ...read.link_traffic import links_between_hosts
from .run import Run

# How the page writes quantities.


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


# The links between hosts as a table: how fast each is while data is on it. See `read.link_traffic`.

MOST_SHOWN = 24


def table_of_links(run: Run) -> Table | None:
    """Return the links, the slowest first; None where the kernels' counts are missing."""
    links = sorted(links_between_hosts(run.timelines), key=lambda link: link.bytes_per_second)
    if not links:
        return None
    rows = [
        [
            link.source, link.target, format_bytes(link.sent_bytes),
            format_bits_per_second(8 * link.bytes_per_second), percent(link.busy_share),
        ]
        for link in links[:MOST_SHOWN]
    ]  # fmt: skip
    more = f" The slowest {MOST_SHOWN} of {len(links)}." if len(links) > MOST_SHOWN else ""
    return Table(
        ["from", "to", "sent", "rate while used", "used"],
        rows,
        texts=2,
        title="Ways between hosts, the slowest first",
        note="By the kernels' account of the ranks' connections. A way that is used all the time is what binds; "
        f"one that is hardly used is faster than its rate says.{more}",
    )


# The parts of a step (`step_parts`) by the names and colours that the page gives them.

PARTS = ("compute", "communication", "waiting", "data", "pauses", "rest")
NAMES: Mapping[str, str] = {
    "compute": "compute",
    "communication": "exposed communication",
    "waiting": "waiting for others",
    "data": "data loading",
    "pauses": "pauses",
    "rest": "rest",
    "hidden": "hidden communication",
}
STYLES = [f"part-{name}" for name in PARTS]


def mean_parts(parts: Sequence[StepParts]) -> dict[str, float]:
    """Return the mean seconds a step by part, with ``hidden`` and ``seconds``."""
    count = max(1, len(parts))
    return {name: sum(getattr(part, name) for part in parts) / count for name in (*PARTS, "hidden", "seconds")}


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str
    quiet: bool = False
    """Small print."""


@dataclass(frozen=True)
class Code:
    """Text to paste."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Figures:
    """Name, value and a word on it, each in a tile."""

    kind: ClassVar[str] = "figures"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Chart:
    """A drawing with a title."""

    kind: ClassVar[str] = "chart"
    title: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Charts:
    """Drawings side by side where there is room."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Table:
    """A table; the first `texts` columns are words, the others numbers."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str | Markup]]
    texts: int = 1
    note: str = ""
    title: str = ""
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Pairs:
    """Names and what they are."""

    kind: ClassVar[str] = "pairs"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Remedy:
    """A fix: what to do, the text to paste, the predicted gain and how it is estimated."""

    what: str
    paste: str = ""
    gain: str = ""
    basis: str = ""


@dataclass(frozen=True)
class FindingBlock:
    """Something that costs time."""

    kind: ClassVar[str] = "finding"
    title: str
    cost: str
    share: str
    confidence: str
    evidence: Sequence[str]
    remedies: Sequence[Remedy]


@dataclass(frozen=True)
class Fold:
    """Details that are folded until opened."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: Sequence[Block]


Block = Text | Code | Figures | Chart | Charts | Table | Pairs | FindingBlock | Fold


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    name: str
    """Anchor in the page, for links."""
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
    lead: str = ""
    """What it shows, in a sentence."""

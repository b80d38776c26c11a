"""The blocks of a section, as plain data; only `page.html.j2` knows how they look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup


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

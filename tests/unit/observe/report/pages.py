"""Reading a written page back: its text, its sections, and that it is one file on its own."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

VOID = ("meta", "br", "link", "rect", "path", "polyline", "polygon")


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts = 0
        self.sections: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag == "section":
            self.sections.append(dict(attrs)["id"] or "")
        if tag not in VOID[:3]:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text.append(data)


class Page:
    """A written page."""

    def __init__(self, path: Path) -> None:
        self.html = path.read_text()
        parser = _Balanced()
        parser.feed(self.html)
        assert parser.open == []
        assert not re.search(r"https?://|\bsrc=|@import|url\(", self.html), "the page refers to nothing outside"
        self.scripts, self.sections = parser.scripts, parser.sections
        self.text = " ".join(" ".join(parser.text).split())
        heading = re.search(r"<h1>(.*?)</h1>", self.html)
        assert heading is not None
        self.heading = unescape(heading[1])

    def figure(self, name: str) -> str:
        """Return a tile of the page: its value and the word on it."""
        beside = '(?:<dd class="beside">(.*?)</dd>)?'
        found = re.search(f"<dt>{re.escape(name)}</dt><dd>(.*?)</dd>{beside}", self.html)
        assert found is not None, f"no figure {name!r}"
        return unescape(f"{found[1]} {found[2] or ''}".strip())

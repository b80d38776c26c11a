"""The part of a page that ``python -m tests.style`` writes: all between two lines that stand in it once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Marked:
    """A part, by the page and by what its two lines say."""

    def __init__(self, page: str, name: str) -> None:
        """Take a page of docs/, and what the part is of."""
        self._page = DOCS / page
        self._start, self._end = f"<!-- {name}: written by `python -m tests.style` -->", f"<!-- end of {name} -->"

    def read(self) -> list[str]:
        """Return the lines of the part, without empty ones around it."""
        return self._parts()[1].strip("\n").splitlines()

    def write(self, lines: Iterable[str]) -> None:
        """Replace them."""
        before, _, after = self._parts()
        text = "\n".join(lines).strip("\n")
        self._page.write_text(f"{before}{self._start}\n\n{text}\n\n{self._end}{after}", encoding="utf-8")

    def _parts(self) -> tuple[str, str, str]:
        text = self._page.read_text(encoding="utf-8")
        for line in (self._start, self._end):
            assert text.count(line) == 1, f"{self._page.name} has not once the line {line!r}"
        before, rest = text.split(self._start)
        part, after = rest.split(self._end)
        return before, part, after

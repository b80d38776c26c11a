"""What belongs to the gate: every test but those that `tests/gate.toml` leaves to ``make test-all``.

A row of the file names a file, a test, or one case of a test, as pytest writes it: ``tests/a.py``,
``tests/a.py::b``, ``tests/a.py::b[int8]``. ``leave`` takes them out of the gate; ``represent`` takes out all cases
of a test but some.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("gate.toml")


def is_below(name: str, row: str) -> bool:
    """Return whether a test is the one that a row names, or one of its cases, or of its file."""
    return name == row or name.startswith((f"{row}::", f"{row}["))


class Selection:
    """The rows of the table."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._left: list[str] = [row for each in table["leave"] for row in each["tests"]]
        self._kept: dict[str, list[str]] = {each["test"]: each["cases"] for each in table["represent"]}

    def leaves(self, name: str) -> bool:
        """Return whether a test runs in ``make test-all`` only."""
        if any(is_below(name, row) for row in self._left):
            return True
        test, _, case = name.partition("[")
        return test in self._kept and case.removesuffix("]") not in self._kept[test]

    def stale(self, names: Sequence[str]) -> list[str]:
        """Return the rows of the files of `names`, all their tests, that name nothing in them."""
        known, files = set(names), {name.partition("::")[0] for name in names}
        rows: Iterable[str] = [
            *self._left,
            *(f"{test}[{case}]" for test, cases in self._kept.items() for case in cases),
        ]
        return [
            row
            for row in rows
            if row.partition("::")[0] in files
            and row not in known
            and not any(is_below(name, row) for name in names)
        ]


def read_selection(path: Path = TABLE) -> Selection:
    """Read the table; each group of rows has its reason."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    without = [each for group in ("leave", "represent") for each in table[group] if not each.get("why")]
    assert not without, f"{path.name}: no reason for {without[0]}"
    return Selection(table)

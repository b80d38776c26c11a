"""The tables of the house in docs/contribute.md, and the list of known violations: how they are written."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tests.style import house
from tests.style.import_graph import Tree
from tests.style.marked import Marked
from tests.style.rules import HOUSE, RULES, Violations, shrunk

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "farandole"
KNOWN = Path(__file__).with_name("known.json")
TABLES = Marked("contribute.md", "house")
"""The part of docs/contribute.md that has them."""


@cache
def source() -> Tree:
    """Return the source, parsed once for all rules."""
    return Tree(SOURCE)


def house_tables() -> list[str]:
    """Return the table of packages, and for each package that of its folders, as lines of Markdown."""
    lines = ["| rank | packages | what they do |", "|---|---|---|"]
    for rank in sorted({rank for rank, _ in house.PACKAGES.values()}, reverse=True):
        row = {name: purpose for name, (own, purpose) in house.PACKAGES.items() if own == rank}
        names = ", ".join(f"`{name}`{_to_come(name)}" for name in row)
        lines.append(f"| {rank} | {names} | {'; '.join(row.values())} |")
    for package, rows in house.FOLDERS.items():
        lines += ["", f"Folders of `{package}`, from low to high:", "", "| folder | what is in it |", "|---|---|"]
        for folder, purpose in rows:
            path = package if folder == "." else f"{package}/{folder}"
            lines.append(f"| `{path}`{_to_come(path)} | {purpose} |")
    return lines


def _to_come(path: str) -> str:
    return " (to come)" if path in house.TO_COME else ""


def known_violations() -> dict[str, Violations]:
    """Return the violations that are allowed until they are mended, by rule."""
    known: dict[str, Violations] = json.loads(KNOWN.read_text())
    return known


def write_known(*, as_found: bool) -> None:
    """Strike off the list what is mended; `as_found` also adds what is new (after a move of files)."""
    tree = source()
    known = known_violations()
    found = {name: rule(tree, HOUSE) for name, rule in RULES.items()}
    listed = {name: found[name] if as_found else shrunk(found[name], known.get(name, {})) for name in RULES}
    KNOWN.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n")

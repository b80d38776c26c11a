"""How large the product is, and how far one has to walk in it: what `ceilings.json` holds a ceiling of.

Code lines have no blanks, comments and docstrings. A thin file is a short one with one importer, to which it
belongs. A small folder has so few files that a list says what it is for. A walk is the number of files that
are entered on the way from a call or a command to its end (`tests.style.entered`).

A ceiling is lowered with each landing, by ``python -m tests.style``. It is raised by hand, for a feature that was
asked for, by no more than that needs.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.style import house
from tests.style.import_graph import Tree
from tests.style.rules import folder_of

FILE = Path(__file__).with_name("ceilings.json")
SLACK = {"code lines": 200}
"""By how much a count may be below its ceiling before that has to be lowered; others: 0, walks: not at all."""


def sizes(tree: Tree) -> dict[str, int]:
    """Return the counts of a tree."""
    importers: dict[str, set[str]] = defaultdict(set)
    for edge in tree.imports:
        if edge.source != edge.target:
            importers[edge.target].add(edge.source)
    files = [module for module in tree.modules if not module.endswith("__init__")]
    folders = Counter(map(folder_of, files))
    return {
        "code lines": sum(code_lines(tree.texts[module], parsed) for module, parsed in tree.modules.items()),
        "files": len(tree.modules),
        "thin files": sum(
            len(importers[module]) == 1 and tree.lines[module] < house.THIN_LINES for module in files
        ),
        "small folders": sum(count < house.SMALL_FOLDER for count in folders.values()),
    }


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the lines of `text`, which `tree` is parsed from, that are code."""
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(1 for number, line in lines if line and not line.startswith("#") and number not in strings)


def ceilings() -> dict[str, int]:
    """Return the ceilings, by what they are of."""
    found: dict[str, int] = json.loads(FILE.read_text())
    return found


def lower(found: dict[str, int]) -> None:
    """Lower each ceiling to what was found, where that is less."""
    told = ceilings()
    lowered = {name: min(ceiling, found.get(name, ceiling)) for name, ceiling in told.items()}
    FILE.write_text(json.dumps(lowered, indent=2) + "\n")

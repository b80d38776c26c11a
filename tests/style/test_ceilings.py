"""The ceilings of `tests.style.ceilings`: nothing is above one, and what has fallen takes its ceiling along."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.style.ceilings import SLACK, ceilings, code_lines, sizes
from tests.style.tables import source
from tests.style.test_rules import made


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    return sizes(source())


@pytest.mark.parametrize("name", ["code lines", "files", "thin files", "small folders"])
def test_the_house_is_below_its_ceilings(counts: dict[str, int], name: str) -> None:
    count, ceiling = counts[name], ceilings()[name]
    assert count <= ceiling, (
        f"{count} {name}, {count - ceiling} above the ceiling: take something out, or raise it in "
        "tests/style/ceilings.json where a new feature needs it"
    )
    assert count >= ceiling - SLACK.get(name, 0), f"{count} {name}: lower the ceiling, python -m tests.style"


def test_what_counts_as_code() -> None:
    text = '"""What\n\nit is."""\n\n# why\na = 1  # one\nb = (\n    2,\n)\n'
    text += 'def f():\n    """Do."""\n    return """x\ny"""\n'
    assert code_lines(text, ast.parse(text)) == 7


def test_thin_files_and_small_folders_are_counted(tmp_path: Path) -> None:
    files = {
        "left/__init__": "",
        "left/a": "from . import b, c, d",  # nothing imports it: a program
        "left/b": "from . import c",
        "left/c": "",  # two importers
        "left/d": "x = 1\n" * 80,  # long
        "right/e": "from .f import g",
        "right/f": "def h():\n    from . import e",
    }
    found = sizes(made(tmp_path, files))
    assert (found["files"], found["thin files"], found["small folders"]) == (7, 3, 1)

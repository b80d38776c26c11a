"""Plain technical English: docs, examples and the source use no word of `tests.style.words.BANNED`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.style.tables import REPOSITORY, SOURCE
from tests.style.words import Use, uses, uses_in_module, uses_in_page

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
ALLOWED: dict[str, int] = json.loads(Path(__file__).with_name("words.json").read_text())
"""Package -> how many banned words its modules still have. The numbers may only shrink."""


def listed(found: list[Use]) -> str:
    """Return a line for each use."""
    return "\n".join(f"  line {use.line}: {use.text!r}; write: {use.instead}" for use in found)


def test_banned_words_are_found() -> None:
    text = "Nobody waits.\n\nOf course. Of these, two. The back end's processors: Of three."
    assert [use.line for use in sorted(uses(text))] == [1, 3, 3, 3, 3]
    assert not list(uses("A list of ranks. Off, often; the process, processing; recommended."))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_pages_are_in_plain_english(path: Path) -> None:
    found = uses_in_page(path)
    assert not found, f"{path.name}:\n{listed(found)}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_in_plain_english(path: Path) -> None:
    found = uses_in_module(path)
    assert not found, f"{path.name}:\n{listed(found)}"


@pytest.mark.parametrize("package", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_the_source_gets_no_further_banned_words(package: str) -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): uses_in_module(path)
        for path in sorted((SOURCE / package).rglob("*.py"))
    }
    count = sum(map(len, found.values()))
    said = "\n".join(f"{name}:\n{listed(some)}" for name, some in found.items() if some)
    assert count <= ALLOWED.get(package, 0), f"words.json allows {ALLOWED.get(package, 0)}, not {count}:\n{said}"

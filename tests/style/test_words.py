"""Plain technical English: docs, examples and the source use no word of `tests.style.words.BANNED`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.style.rules import package_of
from tests.style.tables import REPOSITORY, source
from tests.style.words import Use, uses, uses_in_page, uses_in_source

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


def by_file(found: Iterable[tuple[str, list[Use]]]) -> str:
    """Return the files with uses, and those below each."""
    return "\n".join(f"{name}:\n{listed(some)}" for name, some in found if some)


def test_pages_are_in_plain_english() -> None:
    found = by_file((str(path.relative_to(REPOSITORY)), uses_in_page(path)) for path in PAGES)
    assert not found, found


def test_examples_are_in_plain_english() -> None:
    found = by_file((path.name, uses_in_source(path.read_text())) for path in EXAMPLES)
    assert not found, found


def test_the_source_gets_no_further_banned_words() -> None:
    packages: dict[str, dict[str, list[Use]]] = defaultdict(dict)
    for module, text in source().texts.items():
        if package := package_of(module):
            packages[package][module] = uses_in_source(text, source().modules[module])
    said = [
        f"{package}: words.json allows {ALLOWED.get(package, 0)}, not {count}:\n{by_file(found.items())}"
        for package, found in packages.items()
        if (count := sum(map(len, found.values()))) > ALLOWED.get(package, 0)
    ]
    assert not said, "\n".join(said)

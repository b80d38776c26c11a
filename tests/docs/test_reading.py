"""The reading guide and the dotted names of all pages name files that exist, and names defined in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.style.tables import source

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "farandole"
PAGE = ROOT / "docs" / "contribute.md"
WALKS = PAGE.read_text().partition("\n## Recipes\n")[0]
_TOKEN = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"[\w/]+\.py")
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)?")


class Mention(NamedTuple):
    """A file that the guide names, and the names that it says are defined there."""

    line: str
    path: str
    names: list[str]


def items(text: str) -> list[str]:
    """Return the numbered lines of the walks, each with its continuation lines."""
    return [" ".join(item.split()) for item in re.findall(r"^\d+\. .*(?:\n +\S.*)*", text, re.M)]


def mentions(text: str) -> Iterator[Mention]:
    """Yield each file of each numbered line, with the names between it and the next file."""
    for item in items(text):
        path, names = "", list[str]()
        for token in _TOKEN.findall(item):
            if _PATH.fullmatch(token):
                if path:
                    yield Mention(item, path, names)
                path, names = token, []
            elif _NAME.fullmatch(token):
                names.append(token)
        yield Mention(item, path, names)


@cache
def defined(path: str) -> frozenset[str]:
    """Return the names that a module defines, and those of its classes as ``Class.name``."""
    found: set[str] = set()
    for node in ast.parse((SOURCE / path).read_text()).body:
        found |= set(_names_of(node))
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for child in node.body for name in _names_of(child)}
    return frozenset(found)


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


MENTIONS = list(mentions(WALKS))


def test_mentions_are_found() -> None:
    text = (
        "1. `a/b.py` `first`: does it.\n   `a/c.py` `Second.name` and `x = 1`.\n2. `d.py`: a file.\n\nNot `e.py`."
    )
    found = [(mention.path, mention.names) for mention in mentions(text)]
    assert found == [("a/b.py", ["first"]), ("a/c.py", ["Second.name"]), ("d.py", [])]


def test_there_are_three_walks_and_that_of_a_gradient_has_ten_steps_at_the_most() -> None:
    walks = re.split(r"^## ", WALKS, flags=re.M)[1:]
    assert [walk.splitlines()[0] for walk in walks] == [
        "The life of a gradient", "The life of a job", "The life of an event",
    ]  # fmt: skip
    assert all(5 <= len(items(walk)) <= most for walk, most in zip(walks, (10, 22, 22), strict=True))


def test_files_and_names_of_the_guide_exist() -> None:
    for mention in MENTIONS:
        assert mention.path, f"no file in: {mention.line}"
        assert (SOURCE / mention.path).is_file(), f"{mention.path} does not exist: {mention.line}"
        missing = [name for name in mention.names if name not in defined(mention.path) and not _is_a_word(name)]
        assert not missing, f"{mention.path} does not define {', '.join(missing)}: {mention.line}"


def _is_a_word(name: str) -> bool:
    return name in {"hierarchical", "fd.init", "fd.distribute"}


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_dotted_names_of_the_pages_exist() -> None:
    made_up = {"farandole.x.y", "farandole.horovod.x.y"}
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in sorted(set(re.findall(r"\bfarandole(?:\.[A-Za-z_]\w*)+", page.read_text())) - made_up)
        if not source().has(name.partition(".")[2])
    ]
    assert missing == []

"""Each rule of the house on trees made up for it: what it must find, and what it must let pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.style.import_graph import Tree, cycles
from tests.style.rules import (
    RULES,
    Layout,
    Violations,
    compare,
    environment_reads,
    import_cycles,
    large_classes,
    long_files,
    missing_rows,
    repeated_classes,
    shrunk,
    two_way_folders,
    upward_folders,
    upward_packages,
)

LAYOUT = Layout(
    packages={"low": (0, ""), "left": (1, ""), "right": (1, ""), "later": (2, "")},
    folders={
        "low": [("words", ""), ("ssh/link", ""), ("ssh", ""), ("one_file", ""), (".", "")],
        "left": [(".", ""), ("x", ""), ("y", "")],
        "right": [("z", "")],
    },
    to_come={"later", "left/x", "left/y"},
    limits={"attributes": 2, "keys": 3, "lines": 3},
    file_records={},
    front_door=("__init__", "version"),
    environment_file="low/env",
)


def made(root: Path, files: dict[str, str]) -> Tree:
    """Write a package named `house` with these files, and read it."""
    for name, text in files.items():
        path = root / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root / "house")


@pytest.mark.parametrize(
    "statement",
    [
        "from ..right import b",
        "from ..right.b import thing",
        "from .. import right\nfrom ..right import b",
        "from house.right import b",
        "from house.right.b import thing",
        "import house.right.b",
        "def f():\n    from ..right import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..right.b import Thing",
        "import importlib\nimportlib.import_module('house.right.b')",
        "try:\n    from ..right.b import thing\nexcept ImportError:\n    pass",
    ],
)
def test_every_import_counts_wherever_and_however_it_is_written(tmp_path: Path, statement: str) -> None:
    tree = made(tmp_path, {"left/a": statement, "right/b": "", "right/__init__": ""})
    assert "right/b" in tree.edges()["left/a"]
    assert "left/a -> right/b" in upward_packages(tree, LAYOUT)


def test_an_import_goes_to_the_module_that_is_named(tmp_path: Path) -> None:
    files = {"low/a": "from . import b\nfrom . import name\nfrom .ssh import job", "low/b": "", "low/ssh/job": ""}
    tree = made(tmp_path, files | {"low/__init__": "name = 1", "low/ssh/__init__": "from ..b import *"})
    assert tree.edges()["low/a"] == {"low/b", "low/__init__", "low/ssh/job"}
    assert tree.edges()["low/ssh/__init__"] == {"low/b"}


def test_relative_imports_of_an_init_start_in_its_package(tmp_path: Path) -> None:
    tree = made(tmp_path, {"low/__init__": "from .b import x\nfrom ..left import c", "low/b": "", "left/c": ""})
    assert tree.edges()["low/__init__"] == {"low/b", "left/c"}


def test_ranks_go_down_only(tmp_path: Path) -> None:
    files = {
        "low/a": "from ..left import b",
        "left/b": "from ..low import c\nfrom ..version import V",
        "low/c": "",
    }
    tree = made(tmp_path, files | {"version": "V = 1", "__init__": "from .left.b import x"})
    assert upward_packages(tree, LAYOUT) == {"low/a -> left/b": 1}


def test_levels_go_down_only_between_folders(tmp_path: Path) -> None:
    files = {
        "low/words/a": "from ..ssh.link import frames",
        "low/ssh/link/frames": "def f():\n    from .. import job",
        "low/ssh/job": "from .link import frames\nfrom ..words import a\nfrom . import other",
        "low/ssh/other": "from .. import one_file",
        "low/one_file": "from .ssh import job",
        "low/top": "from .one_file import x\nfrom .words import a",
    }
    assert upward_folders(made(tmp_path, files), LAYOUT) == {
        "low/words/a -> low/ssh/link/frames": 1,
        "low/ssh/link/frames -> low/ssh/job": 1,
        "low/ssh/other -> low/one_file": 1,
    }


def test_an_init_without_a_row_imports_nothing_of_its_package(tmp_path: Path) -> None:
    files = {"right/__init__": "from .z import a", "right/z/a": "from .. import name", "left/__init__": ""}
    assert upward_folders(made(tmp_path, files), LAYOUT) == {"right/__init__ -> right/z/a": 1}


ALL_ROWS = {f"{name}/a": "" for name in ("low", "low/words", "low/ssh/link", "low/ssh", "left", "right/z")}


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, []),
        ({"low/nowhere/a": ""}, ["low/nowhere/a is in no row of low"]),
        ({"strange/a": ""}, ["strange has no rank"]),
        ({"later/a": ""}, ["later is there, but still to come", "later/a is in no row of later"]),
    ],
)
def test_every_module_has_a_row_and_every_row_a_module(
    tmp_path: Path, more: dict[str, str], found: list[str]
) -> None:
    assert sorted(missing_rows(made(tmp_path, {**ALL_ROWS, "low/one_file": "", **more}), LAYOUT)) == found


def test_a_row_without_modules_is_found(tmp_path: Path) -> None:
    tree = made(tmp_path, ALL_ROWS)
    assert list(missing_rows(tree, LAYOUT)) == ["low/one_file is in the table, but there is nothing"]
    to_come = replace(LAYOUT, to_come=LAYOUT.to_come | {"low/one_file", "low/words", "low/unknown"})
    assert sorted(missing_rows(tree, to_come)) == [
        "low/unknown is to come, but has no row",
        "low/words is there, but still to come",
    ]


def test_folders_that_import_each_other_are_found(tmp_path: Path) -> None:
    files = {"left/x/a": "from ..y import b", "left/y/b": "", "left/y/c": "def f():\n    from ..x.d import e"}
    assert two_way_folders(made(tmp_path, files | {"left/x/d": ""}), LAYOUT) == {"left/x/ <-> left/y/": 1}
    assert not two_way_folders(made(tmp_path, {"left/y/c": ""}), LAYOUT)


def test_cycles_of_all_imports_are_found_but_not_through_the_front_door(tmp_path: Path) -> None:
    files = {
        "left/a": "from .b import x",
        "left/b": "def f():\n    from . import c",
        "left/c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y",
        "left/outside": "from .a import x\nimport house",
        "__init__": "from .left.outside import x",
    }
    assert import_cycles(made(tmp_path, files), LAYOUT) == {"left/a, left/b, left/c": 3}


def test_an_init_that_its_own_modules_import_is_a_cycle(tmp_path: Path) -> None:
    files = {"left/__init__": "from .a import x", "left/a": "from . import y"}
    assert import_cycles(made(tmp_path, files), LAYOUT) == {"left/__init__, left/a": 2}


def test_tarjan_finds_each_cycle_once() -> None:
    edges = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a", "e"}, "g": set[str]()}
    assert cycles(edges) == [["a", "b"], ["c", "d", "e"]]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import os\nx = os.environ['A']\nos.putenv('A', 'b')", 2),
        ("import os as system\nsystem.getenv('A')", 1),
        ("from os import environ, path", 1),
        ("import os\nx = os.environb", 1),
        ("def read(environ):\n    return environ['A']", 0),
        ('"""os.environ is not read here."""', 0),
    ],
)
def test_reads_of_the_environment_are_counted(tmp_path: Path, text: str, count: int) -> None:
    expected = {"left/a": count} if count else {}
    assert (
        environment_reads(made(tmp_path, {"left/a": text, "low/env": "import os\nos.environ"}), LAYOUT) == expected
    )


def test_lines_are_counted(tmp_path: Path) -> None:
    files = {"left/a": "\n" * 3, "left/b": "\n" * 4, "left/c": ""}
    tree = made(tmp_path, files)
    assert long_files(tree, LAYOUT) == {"left/b": 4}


def test_class_names_of_several_files_are_found(tmp_path: Path) -> None:
    twice = {"left/a": "class Once: ...\nclass Twice: ...", "right/b": "def f():\n    class Twice: ..."}
    assert repeated_classes(made(tmp_path, twice), LAYOUT) == {"Twice": 2}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("a: int\n    b: str = ''\n    c: 'ClassVar[int]' = 1", 0),
        ("a: int\n    b: str = ''\n    c: int = 1", 3),
        ("__slots__ = ('a', 'b', 'c')", 3),
        ("def __init__(self):\n        self.a, self.b = 1, 2\n    def f(self):\n        self.a = self.a.c", 0),
        ("def __init__(self):\n        self.a = 1\n    def f(self):\n        with x as self.b:\n"
         "            self.c += 1\n            self.c: int = 2", 3),
        ("def f(self, other):\n        other.a = other.b = other.c = 1", 0),
        ("@classmethod\n    def f(cls):\n        self = cls()\n        self.a = self.b = self.c = 1", 0),
    ],
)  # fmt: skip
def test_attributes_of_a_class_are_counted(tmp_path: Path, body: str, count: int) -> None:
    expected = {"left/a:A": count} if count else {}
    assert large_classes(made(tmp_path, {"left/a": f"class A:\n    {body}\n"}), LAYOUT) == expected


@pytest.mark.parametrize(
    ("decorator", "fields", "expected"),
    [
        ("@dataclass(frozen=True)", 3, {}),
        ("@dataclasses.dataclass(slots=True, frozen=True)", 3, {}),
        ("@dataclass(frozen=True)", 4, {"left/a:A": 4}),
        ("@dataclass", 3, {"left/a:A": 3, "left/a:A is no frozen record": 1}),
        ("@dataclass(frozen=False)", 2, {"left/a:A is no frozen record": 1}),
    ],
)
def test_frozen_records_of_a_file_may_have_more(
    tmp_path: Path, decorator: str, fields: int, expected: Violations
) -> None:
    body = "".join(f"    field{number}: int\n" for number in range(fields))
    layout = replace(LAYOUT, file_records={"left/a:A": "a.toml"})
    assert large_classes(made(tmp_path, {"left/a": f"{decorator}\nclass A:\n{body}"}), layout) == expected


def test_a_record_that_is_gone_is_struck_off_the_list(tmp_path: Path) -> None:
    layout = replace(LAYOUT, file_records={"left/a:Gone": "a.toml"})
    assert large_classes(made(tmp_path, {"left/a": ""}), layout) == {"left/a:Gone is no frozen record": 1}


def test_the_list_of_known_violations_may_only_shrink() -> None:
    known = {"stays": 3, "better": 3, "worse": 3, "mended": 1}
    found = {"stays": 3, "better": 2, "worse": 4, "new": 1}
    assert compare(found, known) == ({"worse": 4, "new": 1}, {"mended": 1})
    assert shrunk(found, known) == {"stays": 3, "better": 2, "worse": 3}


@pytest.mark.parametrize("rule", RULES)
def test_a_house_in_order_breaks_no_rule(tmp_path: Path, rule: str) -> None:
    expected: Violations = {}
    assert RULES[rule](made(tmp_path, {**ALL_ROWS, "low/one_file": "", "low/env": ""}), replace(
        LAYOUT, limits={"attributes": 9, "keys": 9, "lines": 9},
    )) == expected  # fmt: skip

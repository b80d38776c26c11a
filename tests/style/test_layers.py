"""The house: who may import whom, what must not be imported at all, and how large things may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.style import house
from tests.style.import_graph import Tree
from tests.style.rules import HOUSE, RULES, compare, package_of
from tests.style.tables import SOURCE, house_tables, known_violations, shown_tables


@cache
def source() -> Tree:
    return Tree(SOURCE)


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_of_the_house_is_broken_anew(rule: str) -> None:
    difference = compare(RULES[rule](source(), HOUSE), known_violations().get(rule, {}))
    assert not difference.new, f"{rule}: {RULES[rule].__doc__}"
    assert not difference.gone, "mended; strike it off the list: python -m tests.style"


def test_known_violations_are_of_rules_that_exist() -> None:
    assert set(known_violations()) <= set(RULES)


def test_contributing_shows_the_tables() -> None:
    assert shown_tables() == house_tables().strip("\n"), "run python -m tests.style"


@pytest.mark.parametrize("package", house.WITHOUT_TORCH)
def test_packages_without_torch(package: str) -> None:
    for module in source().modules:
        if package_of(module) == package:
            for name, line in source().outside_imports(module):
                assert name.split(".")[0] != "torch", f"{module}:{line}: {package} must not import torch"


def test_no_print_outside_the_command_line() -> None:
    for path in modules():
        if package_of(path.relative_to(SOURCE).as_posix()) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}"


def test_every_module_says_what_it_is() -> None:
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_import_farandole_imports_no_torch() -> None:
    code = "import sys, farandole; assert not {'torch', 'numpy', 'rich', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

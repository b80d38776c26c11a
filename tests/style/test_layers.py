"""The house: who may import whom, what must not be imported at all, and how large things may grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.style import house
from tests.style.rules import HOUSE, RULES, compare, package_of
from tests.style.tables import TABLES, house_tables, known_violations, source


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_of_the_house_is_broken_anew(rule: str) -> None:
    difference = compare(RULES[rule](source(), HOUSE), known_violations().get(rule, {}))
    assert not difference.new, f"{rule}: {RULES[rule].__doc__}"
    assert not difference.gone, "mended; strike it off the list: python -m tests.style"


def test_known_violations_are_of_rules_that_exist() -> None:
    assert set(known_violations()) <= set(RULES)


def test_the_page_shows_the_tables() -> None:
    assert TABLES.read() == house_tables(), "run python -m tests.style"


def test_packages_without_torch() -> None:
    for module in source().modules:
        if package_of(module) in house.WITHOUT_TORCH:
            for name, line in source().outside_imports(module):
                assert name.split(".")[0] != "torch", f"{module}:{line}: its package must not import torch"


def test_no_print_outside_the_command_line() -> None:
    for module, tree in source().modules.items():
        if package_of(module) == "cli":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{module}:{node.lineno}"


def test_every_module_says_what_it_is() -> None:
    assert [module for module, tree in source().modules.items() if not ast.get_docstring(tree)] == []


def test_modules_that_are_started_by_name_are_there() -> None:
    """No import shows it when a file moves that another process is started with."""
    wrong = []
    for module, tree in source().modules.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            text = node.value
            is_module = re.fullmatch(rf"farandole\.({'|'.join(house.PACKAGES)})(\.\w+)*", text)
            if is_module and not source().has(text.partition(".")[2]):
                wrong.append(f"{module}:{node.lineno}: {text}")
    assert not wrong, "a module or its attribute"


def test_nothing_follows_the_call_that_starts_a_program() -> None:
    """``python -m`` runs `main` where it is called: what is defined below it is not there yet."""
    wrong = []
    for module, tree in source().modules.items():
        starts = [
            at
            for at, node in enumerate(tree.body)
            if isinstance(node, ast.If) and "__name__" in _names_of(node.test)
        ]
        if starts and starts[0] + 1 < len(tree.body):
            wrong.append(f"{module}:{tree.body[starts[0] + 1].lineno}")
    assert not wrong, "the last statement of its file"


def _names_of(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def test_modules_that_comments_name_are_there() -> None:
    ours = "|".join(name for name in house.PACKAGES if name not in ("keras", "horovod"))  # also names of others
    dotted = re.compile(rf"`((?:{ours})(?:\.\w+)+)(?<!\.toml)(?<!\.json)`")
    wrong = [
        f"{module}: {name}"
        for module, text in source().texts.items()
        for name in sorted(set(dotted.findall(text)))
        if not source().has(name)
    ]
    assert not wrong, "a module or its attribute"


def test_import_farandole_imports_no_torch() -> None:
    code = "import sys, farandole; assert not {'torch', 'numpy', 'rich', 'jinja2', 'psutil'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The house: who may import whom, and what must not be imported at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "farandole"

RANKS = {
    "core": 0,
    "comm": 1, "plan": 1, "observe": 1, "launch": 1,
    "sync": 2, "parallel": 2,
    "train": 3,
    "bench": 4, "horovod": 4,
    "cli": 5,
}  # fmt: skip
WITHOUT_TORCH = {"core", "plan", "observe", "launch"}
EVERYWHERE = {"version"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def imports(path: Path) -> list[tuple[str, int]]:
    """Return the absolute names a module imports, with the line, also inside functions."""
    package = ["farandole", *path.relative_to(SOURCE).with_suffix("").parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            # `from .. import x` and `from . import x` may name modules.
            found += (
                [(f"{full}.{alias.name}", node.lineno) for alias in node.names]
                if node.level
                else [(full, node.lineno)]
            )
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_lower_layer_never_imports_a_higher_one(path: Path) -> None:
    mine = package_of(path)
    if not mine:
        return  # the package's own front door: lazy names, checked below
    assert mine in RANKS, f"{mine} is in no layer of DESIGN"
    for name, line in imports(path):
        if not name.startswith("farandole."):
            continue
        theirs = name.split(".")[1]
        if theirs in EVERYWHERE or theirs == mine:
            continue
        assert theirs in RANKS, f"{path.name}:{line} imports {name}, which is in no layer"
        assert RANKS[theirs] < RANKS[mine], f"{path.name}:{line}: {mine} must not import {theirs}"


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_packages_without_torch(package: str) -> None:
    for path in sorted((SOURCE / package).rglob("*.py")):
        for name, line in imports(path):
            assert name.split(".")[0] != "torch", f"{path.name}:{line}: {package} must not import torch"


def test_only_one_file_reads_the_environment_for_settings() -> None:
    readers = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv")
                and package_of(path) != "launch"
            ):
                readers.add(str(path.relative_to(SOURCE)))
    assert readers <= {"core/env.py", "cli/job.py", "bench/demo.py"}, readers


def test_no_print_outside_the_command_line() -> None:
    for path in modules():
        if package_of(path) == "cli":
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

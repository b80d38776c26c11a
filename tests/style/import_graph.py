"""Which module of a source tree imports which: every import counts, wherever it stands.

Imports inside functions and under TYPE_CHECKING are edges like any other. An edge goes to the module that is
named: ``from .world import World`` to ``comm/world``, ``from . import world`` to the same when there is such a
module, else to the package's ``__init__``. Modules are written as paths: ``comm/world``, ``comm/__init__``.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One import statement's edge."""

    source: str
    target: str
    line: int
    is_type: bool
    """Whether it stands under TYPE_CHECKING, and imports nothing."""


class Tree:
    """The modules of one package directory, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = root.name
        self.modules: dict[str, ast.Module] = {}
        self.texts: dict[str, str] = {}
        self.lines: dict[str, int] = {}
        self._names: dict[str, set[str | None]] = {}
        for path in sorted(root.rglob("*.py")):
            text = path.read_text()
            module = path.relative_to(root).with_suffix("").as_posix()
            self.modules[module] = ast.parse(text)
            self.texts[module] = text
            self.lines[module] = text.count("\n")
        self.imports = [edge for module in self.modules for edge in self._imports_of(module)]

    def edges(self, owners: Collection[str] = ()) -> dict[str, set[str]]:
        """Return module -> the modules it imports, itself left out; of `owners` not what they name as types."""
        edges: dict[str, set[str]] = {module: set() for module in self.modules}
        for edge in self.below(owners):
            if edge.source != edge.target:
                edges[edge.source].add(edge.target)
        return edges

    def below(self, owners: Collection[str]) -> list[Import]:
        """Return the imports without the types of what `owners` hold."""
        return [edge for edge in self.imports if not (edge.is_type and edge.source in owners)]

    def outside_imports(self, module: str) -> list[tuple[str, int]]:
        """Return the absolute names that a module imports, with their lines."""
        return [(name, line) for name, line, _ in _named(self.modules[module], self._dotted(module))]

    def has(self, dotted: str) -> bool:
        """Return whether ``a.b.c`` below the package is a module, a folder, or a name that one of them has."""
        parts = dotted.split(".")
        for length in range(len(parts), -1, -1):
            path, rest = "/".join(parts[:length]), parts[length:]
            for module in (path, f"{path}/__init__".lstrip("/")):
                if module in self.modules:
                    return not rest or rest[0] in self._names_of(module)
        return False

    def _names_of(self, module: str) -> set[str | None]:
        """Return what a module defines, imports, assigns or mentions; kept for the next question."""
        if module not in self._names:
            self._names[module] = {
                getattr(node, attribute, "")
                for node in ast.walk(self.modules[module])
                for attribute in ("name", "id", "asname")
            }
        return self._names[module]

    def _dotted(self, module: str) -> list[str]:
        return [self.name, *module.split("/")]

    def _imports_of(self, module: str) -> list[Import]:
        found = []
        types = _lines_of_types(self.modules[module])
        for name, line, attribute in _named(self.modules[module], self._dotted(module)):
            target = self._resolve(name, attribute)
            if target is not None:
                found.append(Import(module, target, line, line in types))
        return found

    def _resolve(self, name: str, attribute: str) -> str | None:
        """Return the module that ``from name import attribute`` names; None: not one of this tree."""
        parts = name.split(".")
        if parts[0] != self.name:
            return None
        for path in ("/".join([*parts[1:], attribute]), "/".join(parts[1:])):
            for module in (path, f"{path}/__init__".lstrip("/")):
                if module in self.modules:
                    return module
        return None


def _named(tree: ast.Module, module: list[str]) -> list[tuple[str, int, str]]:
    """Return (absolute name, line, attribute) of each import; the attribute is empty for ``import name``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found += [(name, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node.func) == "import_module" and node.args:
            wanted = node.args[0]
            if isinstance(wanted, ast.Constant) and isinstance(wanted.value, str):
                found.append((wanted.value, node.lineno, ""))
    return found


def _lines_of_types(tree: ast.Module) -> set[int]:
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {
        line for each in blocks for node in each.body for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two or more modules (Tarjan), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(edges.get(module, ())):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return sorted(found)

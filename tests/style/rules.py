"""The rules of the house as pure functions: a tree and a table go in, violations come out.

A rule returns ``{violation: number}``; the number is how bad it is (lines, files, reads, modules), else 1.
Violations that stand in `known.json` are allowed until they are gone: the list may only shrink.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.style import house
from tests.style.import_graph import Tree, cycles

Violations = dict[str, int]
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Layout:
    """A table to test against: see `tests.style.house`."""

    packages: dict[str, tuple[int, str]]
    folders: dict[str, list[tuple[str, str]]]
    to_come: set[str]
    limits: dict[str, int]
    file_records: dict[str, str]
    front_door: tuple[str, ...]
    environment_file: str
    owners: tuple[str, ...] = ()


HOUSE = Layout(
    house.PACKAGES, house.FOLDERS, house.TO_COME,
    house.LIMITS, house.FILE_RECORDS, house.FRONT_DOOR, house.ENVIRONMENT_FILE, house.OWNERS,
)  # fmt: skip


def package_of(module: str) -> str:
    """Return the package of a module; empty for the root's own files."""
    return module.split("/", maxsplit=1)[0] if "/" in module else ""


def folder_of(module: str) -> str:
    """Return the directory of a module, as a path from the root."""
    return module.rpartition("/")[0]


def level_of(module: str, layout: Layout) -> str | None:
    """Return the row of its package's table that a module belongs to, the longest that fits; None: no row."""
    package, _, path = module.partition("/")
    rows = [row for row, _ in layout.folders.get(package, [])]
    fits = [row for row in rows if path == row or path.startswith(f"{row}/")]
    if not fits and "/" not in path and "." in rows:
        fits = ["."]
    return max(fits, key=len, default=None)


def missing_rows(tree: Tree, layout: Layout) -> Violations:
    """Return modules without a row, rows without modules, and rows that are no longer to come."""
    found = {}
    used = set()
    for module in tree.modules:
        package = package_of(module)
        if not package:
            continue
        level = level_of(module, layout)
        used |= {package, f"{package}/{level}"}
        if package not in layout.packages:
            found[f"{package} has no rank"] = 1
        elif level is None and module != f"{package}/__init__":
            found[f"{module} is in no row of {package}"] = 1
    rows = {f"{package}/{row}" for package, table in layout.folders.items() for row, _ in table}
    rows |= set(layout.packages)
    expected = {row for row in rows if row not in layout.to_come and package_of(f"{row}/") not in layout.to_come}
    found |= {f"{row} is in the table, but there is nothing": 1 for row in expected - used}
    found |= {f"{row} is there, but still to come": 1 for row in layout.to_come & used}
    found |= {f"{row} is to come, but has no row": 1 for row in layout.to_come - rows}
    return found


def upward_packages(tree: Tree, layout: Layout) -> Violations:
    """Return imports of a package whose rank is not lower."""
    found: Violations = defaultdict(int)
    for edge in tree.imports:
        mine, theirs = package_of(edge.source), package_of(edge.target)
        if not mine or mine == theirs or edge.target in layout.front_door:
            continue
        ranks = [layout.packages.get(package, (0, ""))[0] for package in (mine, theirs)]
        if not theirs or ranks[1] >= ranks[0]:
            found[f"{edge.source} -> {edge.target}"] += 1
    return dict(found)


def upward_folders(tree: Tree, layout: Layout) -> Violations:
    """Return imports inside a package that do not go down its table."""
    found: Violations = defaultdict(int)
    for edge in tree.below(layout.owners):
        package = package_of(edge.source)
        if not package or package != package_of(edge.target):
            continue
        rows = [None, *(row for row, _ in layout.folders.get(package, []))]
        mine, theirs = level_of(edge.source, layout), level_of(edge.target, layout)
        if rows.index(theirs) > rows.index(mine):
            found[f"{edge.source} -> {edge.target}"] += 1
    return dict(found)


def two_way_folders(tree: Tree, layout: Layout) -> Violations:
    """Return pairs of folders that import each other; a file with a row of its own counts as a folder."""

    def place(module: str) -> str:
        path = module.partition("/")[2]
        return module if level_of(module, layout) == path else f"{folder_of(module)}/"

    pairs = {
        (place(edge.source), place(edge.target))
        for edge in tree.below(layout.owners)
        if package_of(edge.source) and package_of(edge.target)
    }
    return {f"{a} <-> {b}": 1 for a, b in pairs if a < b and (b, a) in pairs}


def import_cycles(tree: Tree, layout: Layout) -> Violations:
    """Return groups of modules that import each other, with their sizes."""
    edges = {
        module: {target for target in targets if target not in layout.front_door}
        for module, targets in tree.edges(layout.owners).items()
        if module not in layout.front_door
    }
    return {", ".join(group): len(group) for group in cycles(edges)}


def environment_reads(tree: Tree, layout: Layout) -> Violations:
    """Return modules that touch the process's environment, with the number of places."""
    found: Violations = defaultdict(int)
    for module, parsed in tree.modules.items():
        if module == layout.environment_file:
            continue
        for node in ast.walk(parsed):
            if isinstance(node, ast.Attribute):
                found[module] += node.attr in ENVIRONMENT_NAMES
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                found[module] += sum(alias.name in ENVIRONMENT_NAMES for alias in node.names)
    return {module: count for module, count in found.items() if count}


def long_files(tree: Tree, layout: Layout) -> Violations:
    """Return files of too many lines, with their numbers."""
    return {module: count for module, count in tree.lines.items() if count > layout.limits["lines"]}


def repeated_classes(tree: Tree, layout: Layout) -> Violations:
    """Return class names that several files define, with the number of files."""
    homes: dict[str, set[str]] = defaultdict(set)
    for module, parsed in tree.modules.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(module)
    return {name: len(modules) for name, modules in homes.items() if len(modules) > 1}


def large_classes(tree: Tree, layout: Layout) -> Violations:
    """Return classes of too many attributes, with their numbers; frozen records of a file may have more."""
    classes = {
        f"{module}:{node.name}": node
        for module, parsed in tree.modules.items()
        for node in ast.walk(parsed)
        if isinstance(node, ast.ClassDef)
    }
    records = {name for name in layout.file_records if name in classes and is_frozen_record(classes[name])}
    found = {f"{name} is no frozen record": 1 for name in layout.file_records.keys() - records}
    for name, node in classes.items():
        count = len(attributes_of(node))
        if count > layout.limits["keys" if name in records else "attributes"]:
            found[name] = count
    return found


def is_frozen_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a frozen dataclass: its attributes are its fields, and do not change."""
    return any(
        isinstance(each, ast.Call)
        and ast.unparse(each.func) in ("dataclass", "dataclasses.dataclass")
        and any(word.arg == "frozen" and ast.unparse(word.value) == "True" for word in each.keywords)
        for each in node.decorator_list
    )


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return a class's own instance attributes: annotated fields, ``__slots__``, what methods assign to self."""
    found = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                found.add(statement.target.id)
        elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            found |= {str(item.value) for item in ast.walk(statement.value) if isinstance(item, ast.Constant)}
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= _assigned_to_self(statement)
    return found


def _assigned_to_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    if not function.args.args and not function.args.posonlyargs:
        return set()
    own = (function.args.posonlyargs + function.args.args)[0].arg
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == own == "self"
    }


RULES: dict[str, Callable[[Tree, Layout], Violations]] = {
    "missing rows": missing_rows,
    "upward packages": upward_packages,
    "upward folders": upward_folders,
    "two-way folders": two_way_folders,
    "import cycles": import_cycles,
    "environment reads": environment_reads,
    "long files": long_files,
    "repeated classes": repeated_classes,
    "large classes": large_classes,
}


class Difference(NamedTuple):
    """What a rule found against what is known."""

    new: Violations
    """Not known, or worse than known: a mistake."""
    gone: Violations
    """Known, and no longer there: to be struck off the list."""


def compare(found: Violations, known: Violations) -> Difference:
    """Compare what a rule found with what is known; a known number may be higher than the one found."""
    new = {name: number for name, number in found.items() if number > known.get(name, 0)}
    gone = {name: number for name, number in known.items() if name not in found}
    return Difference(new, gone)


def shrunk(found: Violations, known: Violations) -> Violations:
    """Return the known violations that are still there, with the lower of both numbers."""
    return {name: min(number, found[name]) for name, number in known.items() if name in found}

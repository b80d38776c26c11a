"""A training script as its syntax tree says it is: names, scopes, and what a name was made by. Nothing is run."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...core.host.paths import reading_python

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEPTH = 6
"""How many names are followed from a use to what made it."""


@dataclass(frozen=True, eq=False)
class Binding:
    """One place that gives a name its value."""

    name: str
    """Dotted: ``loader``, ``self.loader``."""
    value: ast.expr
    statement: ast.stmt
    scope: ast.AST
    index: int | None = None
    """Which part of the value, where a tuple is unpacked."""


@dataclass
class Script:
    """A parsed script, with the parent of each node."""

    path: Path
    text: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    """Local name -> dotted name of what was imported."""
    functions: dict[str, list[Function]] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self._note_names()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value, node)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._bind(node.target, node.value, node)
            elif isinstance(node, ast.NamedExpr):
                self._bind(node.target, node.value, self.statement_of(node))

    def _note_names(self) -> None:
        """Take down what is imported and defined."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.imports[name] = alias.name if alias.asname else name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{node.module or '.'}.{alias.name}"
            elif isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node

    def _bind(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        scope = self.scope_of(statement)
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
            for index, each in enumerate(target.elts):
                if parts is not None and len(parts) == len(target.elts):
                    self._bind(each, parts[index], statement)
                elif name := dotted(each):
                    self.bindings.append(Binding(name, value, statement, scope, index))
        elif name := dotted(target):
            self.bindings.append(Binding(name, value, statement, scope))

    def scope_of(self, node: ast.AST) -> ast.AST:
        """Return the innermost function that contains `node`, or the module."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            parent = self.parents.get(parent)
        return parent or self.tree

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class whose method contains `node`."""
        parent: ast.AST | None = node
        while parent is not None and not isinstance(parent, ast.ClassDef):
            parent = self.parents.get(parent)
        return parent

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the statement that `node` belongs to."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def full_name(self, node: ast.expr) -> str:
        """Return the dotted name of a callable, imports resolved: ``optim.SGD`` -> ``torch.optim.SGD``."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest

    def calls(self) -> Iterator[ast.Call]:
        """Yield every call."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def bindings_of(self, name: str, at: ast.AST) -> list[Binding]:
        """Return what gives `name` its value where `at` reads it: in its scope, those around it, or its class."""
        if name.startswith("self."):
            owner = self.class_of(at)
            return [b for b in self.bindings if b.name == name and self.class_of(b.statement) is owner]
        scope: ast.AST | None = self.scope_of(at)
        while scope is not None:
            found = [b for b in self.bindings if b.name == name and b.scope is scope]
            if found or (isinstance(scope, Function) and name in parameters(scope)):
                return found
            scope = None if scope is self.tree else self.scope_of(scope)
        return []

    def origins(self, name: str, at: ast.AST, depth: int = _DEPTH) -> list[Binding]:
        """Return the bindings that a name's value may come from, through names, arguments and constructors."""
        if depth <= 0:
            return []
        found: list[Binding] = []
        own = self.bindings_of(name, at)
        for binding in own:
            other = dotted(binding.value)
            deeper = self.origins(other, binding.statement, depth - 1) if other and binding.index is None else []
            found += deeper or [binding]
        scope = self.scope_of(at)
        while not own and isinstance(scope, Function):
            if name in parameters(scope):
                for argument in self._arguments(scope, name):
                    passed = dotted(argument)
                    found += self.origins(passed, argument, depth - 1) if passed else []
                break
            scope = self.scope_of(scope)
        return found

    def _arguments(self, function: Function, name: str) -> Iterator[ast.expr]:
        """Yield what callers in this script give for a parameter of `function`."""
        owner = self.parents.get(function)
        is_method = isinstance(owner, ast.ClassDef)
        position = parameters(function).index(name) - is_method
        for call in self.calls():
            last = dotted(call.func).rpartition(".")[2]
            called = (
                owner.name if isinstance(owner, ast.ClassDef) and function.name == "__init__" else function.name
            )
            if last != called:
                continue
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            if name in keywords:
                yield keywords[name]
            elif 0 <= position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
                yield call.args[position]

    def returned(self, call: ast.Call, index: int | None) -> list[tuple[ast.expr, ast.AST]]:
        """Return the expressions that a call of a function of this script returns, with where they stand."""
        found: list[tuple[ast.expr, ast.AST]] = []
        for function in self.functions.get(dotted(call.func).rpartition(".")[2], []):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None and self.scope_of(node) is function:
                    value = node.value
                    if index is not None:
                        if not isinstance(value, ast.Tuple) or index >= len(value.elts):
                            continue
                        value = value.elts[index]
                    found.append((value, node))
        return found


def read_script(path: Path) -> Script:
    """Parse a script. Raises `ConfigError` for what cannot be read or is no Python."""
    with reading_python(path):
        raw = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
        return Script(path, text, ast.parse(text))


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def parameters(function: Function) -> list[str]:
    """Return the names of a function's parameters in order."""
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

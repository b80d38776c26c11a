"""The lines that make a training script distributed, where they go, and the diff."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError
from .refusals import refuse_foreign
from .roles import Loader, Trained, at, find_loaders, find_trained, training_loops
from .script import Script, dotted, read_script

_MOVES = {"to", "cuda", "cpu", "half", "float", "bfloat16", "double", "load_state_dict", "apply"}
"""Calls on a model that may come between its optimizer and the loop, and belong before `distribute`."""


@dataclass(frozen=True)
class Proposal:
    """A changed script, and what to know of it."""

    path: Path
    before: str
    after: str
    notes: tuple[str, ...]

    @property
    def diff(self) -> str:
        """The change as a unified diff."""
        name = str(self.path)
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True), self.after.splitlines(keepends=True), name, name
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"script": str(self.path), "diff": self.diff, "notes": list(self.notes)}


@dataclass(frozen=True)
class _Insert:
    after: int
    """Line, counted from 1; 0: before the first."""
    text: str
    """With its indentation, without an end of line."""
    order: int = 0


def propose(path: Path) -> Proposal:
    """Return the change that makes a script train on several processes. Raises `ConfigError` where it cannot."""
    script = read_script(path)
    refuse_foreign(script)
    trained, loaders = find_trained(script), find_loaders(script)
    on = [loader for loader in loaders if loader.is_trained_on]
    _refuse_unclear(script, trained, on)
    module = "farandole" if _has_name(script, "fd") else "fd"
    inserts = [_import(script, module), _init(script, module)]
    inserts += [_distribute(script, each, module) for each in trained]
    inserts += [
        _after(script, loader.statements, f"{loader.name} = {module}.shard({loader.name})", 2) for loader in on
    ]
    after = _apply(script.text, inserts)
    try:
        compile(after, str(path), "exec", dont_inherit=True)
    except SyntaxError as problem:
        raise ConfigError(
            f"{path}:{problem.lineno}: the change would not be valid Python", remedy="add the three lines by hand"
        ) from None
    return Proposal(path, script.text, after, tuple(_notes(script, loaders, module)))


def _refuse_unclear(script: Script, trained: Sequence[Trained], on: Sequence[Loader]) -> None:
    loops = training_loops(script)
    if not trained:
        raise ConfigError(
            f"{script.path}: no optimizer is made in this file",
            remedy="give the file that makes it, or add fd.distribute(model, optimizer) after it",
        )
    if not loops:
        raise ConfigError(
            f"{script.path}: no loop calls backward()", remedy="give the file that has the training loop"
        )
    if not on:
        over = next((ast.unparse(loop.iter) for loop in loops if isinstance(loop, ast.For)), "while")
        raise ConfigError(
            f"{at(script, loops[0])}: the loop over {over!r} draws from no DataLoader that has a name in "
            "this file, so every rank would train on the same samples",
            remedy="make a DataLoader before the loop, or add where it is made: loader = fd.shard(loader)",
        )


def _has_name(script: Script, name: str) -> bool:
    return name in script.imports or any(
        (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.arg) and node.arg == name)
        for node in ast.walk(script.tree)
    )


# -- where lines go --------------------------------------------------------------------------------


def _import(script: Script, module: str) -> _Insert:
    return _Insert(_end_of_imports(script), "import farandole" + (" as fd" if module == "fd" else ""))


def _init(script: Script, module: str) -> _Insert:
    guard = _main_guard(script)
    if guard is not None:
        first = guard.body[0]
        return _Insert(first.lineno - 1, f"{_indent(script, first)}{module}.init()", 1)
    return _Insert(_end_of_imports(script), f"\n{module}.init()", 1)


def _main_guard(script: Script) -> ast.If | None:
    """Return ``if __name__ == "__main__":``, when it has lines of its own."""
    for node in script.tree.body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            return node if node.body[0].lineno > node.lineno else None
    return None


def _end_of_imports(script: Script) -> int:
    """Return the last line of the imports at the top."""
    last = 0
    for index, node in enumerate(script.tree.body):
        is_text = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not isinstance(node, (ast.Import, ast.ImportFrom)):
            break
        last = node.end_lineno or node.lineno
    return last


def _distribute(script: Script, trained: Trained, module: str) -> _Insert:
    optimizers = ", ".join(trained.optimizers)
    given = optimizers if len(trained.optimizers) == 1 else f"[{optimizers}]"
    call = f"{module}.distribute({trained.model}, {given})"
    target = optimizers if len(trained.optimizers) == 1 else f"({optimizers})"
    text = call if trained.model == "self" else f"{trained.model}, {target} = {call}"
    return _after(script, trained.statements, text, 1, model=trained.model)


def _after(script: Script, statements: Sequence[ast.stmt], text: str, order: int, model: str = "") -> _Insert:
    """Return an insertion behind the last of `statements`, in the innermost block that has all of them."""
    block, last = _common_block(script, statements)
    for later in block[block.index(last) + 1 :]:
        if isinstance(later, (ast.Expr, ast.Assign)) and _moves(later.value, model):
            last = later
        elif not isinstance(later, (ast.Expr, ast.Assign)):
            break
    return _Insert(last.end_lineno or last.lineno, _indent(script, last) + text, order)


def _moves(value: ast.expr, model: str) -> bool:
    if not model or not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return value.func.attr in _MOVES and dotted(value.func.value) == model


def _common_block(script: Script, statements: Sequence[ast.stmt]) -> tuple[list[ast.stmt], ast.stmt]:
    chains = [_chain(script, statement) for statement in statements]
    for owner_block, statement in chains[0]:
        inside = [next((s for b, s in chain if b is owner_block), None) for chain in chains]
        found = [each for each in inside if each is not None]
        if len(found) == len(chains) and _has_own_line(script, statement):
            return owner_block, max(found, key=lambda each: each.lineno)
    raise ConfigError(
        f"{at(script, statements[0])}: the lines that belong together are in different functions",
        remedy="add the lines by hand: see README",
    )


def _chain(script: Script, statement: ast.stmt) -> list[tuple[list[ast.stmt], ast.stmt]]:
    """Return the blocks around a statement, innermost first, each with its own statement that has this one."""
    found: list[tuple[list[ast.stmt], ast.stmt]] = []
    node: ast.AST = statement
    while node is not script.tree:
        parent = script.parents[node]
        if isinstance(node, ast.stmt):
            for name in ("body", "orelse", "finalbody", "handlers"):
                block = getattr(parent, name, None)
                if isinstance(block, list) and node in block:
                    found.append((block, node))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        node = parent
    return found


def _has_own_line(script: Script, statement: ast.stmt) -> bool:
    return not script.text.split("\n")[statement.lineno - 1][: statement.col_offset].strip()


def _indent(script: Script, statement: ast.stmt) -> str:
    line = script.text.split("\n")[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _apply(text: str, inserts: Sequence[_Insert]) -> str:
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split(end)
    for insert in sorted(inserts, key=lambda each: (each.after, each.order), reverse=True):
        lines[insert.after : insert.after] = insert.text.split("\n")
    return end.join(lines)


# -- what to know ----------------------------------------------------------------------------------


def _notes(script: Script, loaders: Sequence[Loader], module: str) -> list[str]:
    notes = [f"batch_size is that of one rank; with split=True, {module}.shard divides it over the ranks"]
    makers = {dotted(b.value.func) for b in script.bindings if isinstance(b.value, ast.Call)}
    rest = [
        loader.name
        for loader in loaders
        if not loader.is_trained_on
        and getattr(script.scope_of(loader.statements[0]), "name", "") not in makers  # its caller has the name
    ]
    if rest:
        notes.append(f"{', '.join(dict.fromkeys(rest))}: not sharded, so every rank evaluates all of it")
    writes = [
        call.lineno
        for call in script.calls()
        if script.full_name(call.func) in ("torch.save", "wandb.init")
        or dotted(call.func).endswith("SummaryWriter")
    ]
    if writes:
        lines = ", ".join(map(str, sorted(set(writes))[:4]))
        notes.append(f"every rank would write at line {lines}: put `if {module}.world().rank == 0:` before")
    pinned = [
        node.lineno
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value)
    ]
    if pinned:
        notes.append(f"line {pinned[0]} names one GPU: use {module}.world().device, or all ranks share it")
    return notes

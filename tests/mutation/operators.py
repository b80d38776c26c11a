"""The faults: which small changes a source file allows.

A mutant replaces one simple statement, or one expression in the head of a compound one, by a variant of itself:

- a comparison, an arithmetic or a boolean operator becomes its neighbour, `not` and minus go;
- a number becomes another one, True becomes False;
- a condition becomes True or False, a returned value None, a bound of a slice moves by one;
- a call, a raise, a deletion or an assignment to an attribute or an element is left out.

Not changed are texts (messages, docstrings, what is logged), annotations, decorators and imports; asserts and
`zip(strict=...)`, which guard against faults of our own; `field(init=...)`, which declares; and sizes and
time-outs that a module names in capitals, whose neighbours are as right.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    first_line: int
    last_line: int
    at_import: bool
    """Whether these lines run when the module is imported, and so in no test of their own."""
    begin: int
    end: int
    """Bytes of the source that are replaced."""
    is_expression: bool
    kind: str
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with this change."""
        text = f"({self.after})" if self.is_expression else self.after
        return source[: self.begin] + text.encode() + source[self.end :]


@dataclass(frozen=True)
class _Piece:
    """A part of the source that is replaced as a whole."""

    node: ast.stmt | ast.expr
    at_import: bool
    is_condition: bool = False


def find_mutants(path: str, source: bytes) -> list[Mutant]:
    """Return every change that `source` allows, in its order."""
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = []
    for piece in _pieces(ast.parse(source).body, at_import=True):
        node = piece.node
        assert node.end_lineno is not None, "a parsed node has an end"
        assert node.end_col_offset is not None, "a parsed node has an end"
        before = ast.unparse(node)
        seen = {before}
        for kind, changed in _variants(piece):
            after = ast.unparse(ast.fix_missing_locations(changed))
            if after in seen:
                continue
            seen.add(after)
            found.append(
                Mutant(
                    path, node.lineno, node.end_lineno, piece.at_import, starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset, isinstance(node, ast.expr), kind, before,
                    after,
                )
            )  # fmt: skip
    return found


def _pieces(body: list[ast.stmt], *, at_import: bool) -> Iterator[_Piece]:
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                given = [*statement.args.defaults, *statement.args.kw_defaults]
                yield from (_Piece(value, True) for value in given if value is not None)
                yield from _pieces(statement.body, at_import=False)
            case ast.ClassDef():
                yield from _pieces(statement.body, at_import=at_import)
            case ast.If():
                if ast.unparse(statement.test) != "TYPE_CHECKING":
                    yield _Piece(statement.test, at_import, is_condition=True)
                    yield from _pieces(statement.body, at_import=at_import)
                yield from _pieces(statement.orelse, at_import=at_import)
            case ast.While():
                yield _Piece(statement.test, at_import)
                yield from _pieces(statement.body, at_import=at_import)
            case ast.For():
                yield _Piece(statement.iter, at_import)
                yield from _pieces([*statement.body, *statement.orelse], at_import=at_import)
            case ast.With():
                yield from (_Piece(item.context_expr, at_import) for item in statement.items)
                yield from _pieces(statement.body, at_import=at_import)
            case ast.Try():
                handled = [inner for handler in statement.handlers for inner in handler.body]
                inside = [*statement.body, *handled, *statement.orelse, *statement.finalbody]
                yield from _pieces(inside, at_import=at_import)
            case ast.Match():
                yield from _pieces([inner for case in statement.cases for inner in case.body], at_import=at_import)
            case _:
                yield from _simple(statement, at_import=at_import)


def _simple(statement: ast.stmt, *, at_import: bool) -> Iterator[_Piece]:
    match statement:
        case ast.AnnAssign(value=ast.expr() as value, target=ast.Name()):
            yield _Piece(value, at_import)
        case ast.Expr(value=ast.Constant()):
            pass  # a docstring, or what stands for no body
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper() and _is_number(value):
            pass
        case (
            ast.Assign()
            | ast.AugAssign()
            | ast.AnnAssign()
            | ast.Return()
            | ast.Raise()
            | ast.Expr()
            | ast.Delete()
        ):
            yield _Piece(statement, at_import)


def _variants(piece: _Piece) -> Iterator[tuple[str, ast.AST]]:
    node = piece.node
    if piece.is_condition:
        yield "condition", ast.Constant(False)
        yield "condition", ast.Constant(True)
    if _can_be_left_out(node):
        yield "left out", ast.Pass()
    if isinstance(node, ast.Raise):
        return  # the rest is its message
    if isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield "returned value", ast.Return(ast.Constant(None))
    count = sum(1 for _ in _changeable(node))
    for number in range(count):
        for which in range(3):
            changed = copy.deepcopy(node)
            for i, inner in enumerate(_changeable(changed)):
                if i == number:
                    kind = _change(inner, which)
                    break
            if kind:
                yield kind, changed


def _is_number(value: ast.expr) -> bool:
    inside = list(ast.walk(value))
    numbers = [node.value for node in inside if isinstance(node, ast.Constant)]
    return (
        len(numbers) > 0
        and not any(isinstance(node, (ast.Name, ast.Call, ast.Dict)) for node in inside)
        and all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)
    )


def _can_be_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Expr() if ast.unparse(node).startswith("logging."):
            return False
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.AugAssign():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AnnAssign(value=ast.expr()):
            return True
    return False


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes inside that a change may start from: not within texts."""
    yield node
    for name, child in ast.iter_fields(node):
        is_text = isinstance(node, ast.JoinedStr)
        if name == "annotation" or is_text or (isinstance(node, ast.keyword) and node.arg in ("strict", "init")):
            continue
        for inner in child if isinstance(child, list) else [child]:
            if isinstance(inner, ast.AST):
                yield from _changeable(inner)


def _change(node: ast.AST, which: int) -> str:
    """Change a node in place in its way number `which`; return what kind of change it is, or nothing for none."""
    match node:
        case ast.Compare() if which < len(node.ops):
            node.ops[which] = COMPARISONS[type(node.ops[which])]()
            return "comparison"
        case ast.BinOp() | ast.AugAssign() if which == 0 and type(node.op) in ARITHMETIC:
            node.op = ARITHMETIC[type(node.op)]()
            return "arithmetic"
        case ast.BoolOp() if which == 0:
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return "boolean"
        case ast.UnaryOp(op=ast.Not() | ast.USub()) if which == 0:
            node.op = ast.UAdd() if isinstance(node.op, ast.USub) else node.op
            if isinstance(node.op, ast.Not):
                node.operand = ast.UnaryOp(ast.Not(), node.operand)
            return "sign"
        case ast.Constant(value=bool()) if which == 0:
            node.value = not node.value
            return "constant"
        case ast.Constant(value=int() | float()) if which == 0 and not isinstance(node.value, bool):
            node.value = {0: 1, 1: 0}.get(node.value, node.value + 1)  # type: ignore[arg-type,operator]
            return "constant"
        case ast.IfExp() if which < 2:
            node.test = ast.Constant(bool(which))
            return "condition"
        case ast.Slice() if which < 2:
            bound = (node.lower, node.upper)[which]
            if bound is None or isinstance(bound, ast.Constant):
                return ""
            moved = ast.BinOp(bound, ast.Sub() if which else ast.Add(), ast.Constant(1))
            node.lower, node.upper = (node.lower, moved) if which else (moved, node.upper)
            return "slice"
    return ""

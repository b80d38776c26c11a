"""``parameter.grad`` has one owner: nothing else in the package assigns or deletes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.style.tables import source

OWNER = "comm/engine/grad_ownership"


def _assigned(tree: ast.AST) -> Iterator[int]:
    """Yield the lines in which some object's attribute ``grad`` is assigned or deleted."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store | ast.Del)
        ) or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("setattr", "delattr")
            and "'grad'" in map(ast.unparse, node.args)
        ):
            yield node.lineno


@pytest.mark.parametrize(
    "text",
    [
        "p.grad = None",
        "p.grad: Tensor = x",
        "p.grad += x",
        "a, p.grad = x",
        "del model.weight.grad",
        "for p.grad in xs: pass",
        'setattr(p, "grad", x)',
        'delattr(p, "grad")',
    ],
)
def test_every_kind_of_assignment_is_found(text: str) -> None:
    assert list(_assigned(ast.parse(text))) == [1]


@pytest.mark.parametrize(
    "text", ["x = p.grad", "p.grad.mul_(2)", "p.grad[0] = 1", "grad = p.grad", "p.gradient = x"]
)
def test_reading_and_changing_numbers_is_no_assignment(text: str) -> None:
    assert not list(_assigned(ast.parse(text)))


def test_grad_is_assigned_by_its_owner_alone() -> None:
    lines = {module: list(_assigned(tree)) for module, tree in source().modules.items()}
    assert lines.pop(OWNER)
    assert {module: some for module, some in lines.items() if some} == {}, f"ask a function of {OWNER}"

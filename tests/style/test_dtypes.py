"""Tensors that travel, or stand beside one that does, have a type of their own, whatever a script's default is.

[Note: the default type is the user's] After `torch.set_default_dtype(torch.float64)` a factory call without a
`dtype` returns another type than the one it was tried with. Native loops take its address and count: they would
write beyond its end.
"""

from __future__ import annotations

import ast

from tests.style.rules import package_of
from tests.style.tables import source

FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "from_file", "frombuffer", "full", "hann_window",
    "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor",
    "tensor", "zeros",
}  # fmt: skip


def without_dtype(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the line and the name of every factory call of torch that leaves the type to the default."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = node.func.value, node.func.attr
        is_factory = isinstance(owner, ast.Name) and owner.id == "torch" and name in FACTORIES
        if is_factory and not any(keyword.arg == "dtype" for keyword in node.keywords):
            found.append((node.lineno, f"torch.{name}"))
    return found


def test_the_rule_sees_what_it_must() -> None:
    text = "x = torch.zeros(3)\ny = torch.zeros(3, dtype=torch.float32)\nz = torch.rand(3)"
    assert without_dtype(ast.parse(text)) == [
        (1, "torch.zeros"),
        (3, "torch.rand"),
    ]


def test_every_factory_call_names_its_dtype() -> None:
    found = [
        f"{module}:{line}: {name}"
        for module, tree in source().modules.items()
        if package_of(module) == "comm"
        for line, name in without_dtype(tree)
    ]
    assert found == []

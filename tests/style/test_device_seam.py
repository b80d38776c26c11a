"""What accelerators do is asked of one seam, `comm/device`: no other file names a kind's module of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.style.rules import folder_of
from tests.style.tables import source

SEAM = "comm/device"
KINDS = {"torch.cuda", "torch.xpu", "torch.mps", "torch.mtia", "torch.accelerator", "torch.get_device_module"}
KINDS |= {"torch.Event", "torch.Stream"}
EXCEPTIONS = {
    "backend": "of the front door, which may import nothing of comm: whether torch sees a GPU",
}
"""Module -> why it may ask torch itself."""


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines that name a kind's module, or what streams are made of, with the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in KINDS:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if _is_of_a_kind(each.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = [f"{node.module}.{each.name}" for each in node.names]
            yield from ((node.lineno, path) for path in paths if _is_of_a_kind(path))


def _is_of_a_kind(path: str) -> bool:
    return any(path == kind or path.startswith(f"{kind}.") for kind in KINDS)


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.synchronize()",
        "x = torch.cuda",
        "import torch.cuda.nccl",
        "from torch import cuda",
        "from torch.cuda import Event",
        "torch.accelerator.synchronize()",
        "torch.get_device_module(device).get_device_name()",
        "event: torch.Event",
    ],
)
def test_every_way_to_name_it_is_found(text: str) -> None:
    assert list(_names(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ['"torch.cuda.is_available()"', "torch.version.cuda", "torch.backends.cuda.matmul"]
)
def test_texts_and_versions_are_none(text: str) -> None:
    assert not list(_names(ast.parse(text)))


def test_accelerators_are_asked_through_the_seam() -> None:
    lines = {module: list(_names(tree)) for module, tree in source().modules.items()}
    said = {module for module, some in lines.items() if some and folder_of(module) != SEAM}
    assert said == set(EXCEPTIONS), f"ask a function of {SEAM}: {[lines[module] for module in said]}"

"""What a codec can do is asked of its `CodecSpec`; its name is compared in two files only."""

from __future__ import annotations

import ast

from farandole.core.vocabulary.codec_spec import OPTIONS
from tests.style.tables import source

HOMES = ("core/vocabulary/codec_spec", "comm/codecs/registry")
NAMES = set(OPTIONS) - {"bf16", "fp16", "fp8"}
"""Without those that precisions have, too."""
OTHER_WORDS = dict.fromkeys(
    [
        "cli/commands/bench",
        "core/vocabulary/config",
        "parallel/recompute",
        "plan/cost/layout",
    ],
    "none",
)
"""Names that are compared with something else: no value of an option, and no limit of a link's rate."""


def compared(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the line and the name of every codec that a string is compared with."""
    found = []
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith"
        ):
            values = list(node.args)
        constants = [each for value in values for each in ast.walk(value) if isinstance(each, ast.Constant)]
        found += [
            (each.lineno, each.value)
            for each in constants
            if isinstance(each.value, str) and each.value.partition(":")[0] in NAMES
        ]
    return found


def test_the_rule_sees_what_it_must() -> None:
    text = 'a = name == "powersgd"\nb = text.startswith("topk")\nc = x in ("int8", "int4:block=16")\nd = f("int8")'
    assert compared(ast.parse(text)) == [(1, "powersgd"), (2, "topk"), (3, "int8"), (3, "int4:block=16")]


def test_no_name_of_a_codec_is_compared() -> None:
    found = [
        f"{module}:{line}: {name}"
        for module, tree in source().modules.items()
        for line, name in compared(tree)
        if module not in HOMES and name != OTHER_WORDS.get(module)
    ]
    assert found == []

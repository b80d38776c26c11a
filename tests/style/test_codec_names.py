"""What a codec can do is asked of its `CodecSpec`; its name is compared in two files only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from farandole.core.vocabulary.codec_spec import OPTIONS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "farandole"
HOMES = ("core/vocabulary/codec_spec.py", "comm/codecs/registry.py")
NAMES = set(OPTIONS) - {"bf16", "fp16"}
"""Without those that precisions have, too."""
OTHER_WORDS = dict.fromkeys(
    [
        "bench/suite/entries.py",
        "cli/commands/bench/command.py",
        "cli/commands/bench/suite.py",
        "core/vocabulary/config.py",
        "parallel/recompute/select.py",
        "plan/cost/layout.py",
    ],
    "none",
)
"""Names that are compared with something else: no value of an option, and no limit of a link's rate."""


def compared(source: str) -> list[tuple[int, str]]:
    """Return the line and the name of every codec that a string is compared with."""
    found = []
    for node in ast.walk(ast.parse(source)):
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
    source = (
        'a = name == "powersgd"\nb = text.startswith("topk")\nc = x in ("int8", "int4:block=16")\nd = f("int8")'
    )
    assert compared(source) == [(1, "powersgd"), (2, "topk"), (3, "int8"), (3, "int4:block=16")]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCE.rglob("*.py")) if str(path.relative_to(SOURCE)) not in HOMES],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_no_name_of_a_codec_is_compared(path: Path) -> None:
    other = OTHER_WORDS.get(str(path.relative_to(SOURCE)))
    assert [each for each in compared(path.read_text()) if each[1] != other] == []

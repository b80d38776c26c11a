"""How large the product may be: code lines, without blanks, comments and docstrings."""

from __future__ import annotations

import ast

from tests.style import house
from tests.style.tables import source


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the lines of `text`, which `tree` is parsed from, that are code."""
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(1 for number, line in lines if line and not line.startswith("#") and number not in strings)


def test_what_counts_as_code() -> None:
    text = '"""What\n\nit is."""\n\n# why\na = 1  # one\nb = (\n    2,\n)\n'
    text += 'def f():\n    """Do."""\n    return """x\ny"""\n'
    assert code_lines(text, ast.parse(text)) == 7


def test_the_product_has_no_more_code_than_the_ceiling() -> None:
    tree = source()
    count = sum(code_lines(tree.texts[module], parsed) for module, parsed in tree.modules.items())
    assert count <= house.CODE_LINES, (
        f"{count - house.CODE_LINES} code lines above the ceiling of tests/style/house.py: take something out, or "
        "raise it and say there what the new lines give"
    )
    assert count > house.CODE_LINES - 200, f"lower the ceiling of tests/style/house.py to {count}"

"""The faults of `benchmarks/mutants.py`: each is one valid change, and none is made where no test could see it."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.mutation.line_map import LineMap
from tests.mutation.operators import find_mutants


def changes(text: str) -> set[str]:
    return {mutant.apply(text.encode()).decode() for mutant in find_mutants("x.py", text.encode())}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(): return a < b", {"return a <= b", "return None"}),
        ("def f(): return a and not b", {"return a or not b", "return a and (not not b)", "return None"}),
        ("x = 2 * y", {"x = 3 * y", "x = 2 // y"}),
        ("x = a - 1", {"x = a + 1", "x = a - 0"}),
        ("x = y[a:b]", {"x = y[a + 1:b]", "x = y[a:b - 1]"}),
        ("x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
        ("x.y = True", {"x.y = False", "pass"}),
        ("x += z", {"x -= z", "pass"}),
        ("f(z)", {"pass"}),
        ("raise E(3)", {"pass"}),
        ("if a is b: c = z", {"if (a is not b): c = z", "if (True): c = z", "if (False): c = z"}),
        ("while not a: c = z", {"while (not not a): c = z"}),
        ("for i in f(8): c = z", {"for i in (f(9)): c = z"}),
        ("def f(a=0): return", {"def f(a=(1)): return"}),
    ],
)
def test_what_is_changed(text: str, expected: set[str]) -> None:
    found = changes(text)
    assert {change.removeprefix("def f(): ") for change in found} == expected
    for change in found:
        ast.parse(change)


@pytest.mark.parametrize(
    "text",
    [
        '"""A text of 3."""', "import a", "assert a < 3", "x: int | None", "@f(1)\nclass A: ...",
        "def f(a: 1): ...", "x = f'{a + 1}'", "if TYPE_CHECKING:\n    x = 1",
    ],
)  # fmt: skip
def test_what_is_not_changed(text: str) -> None:
    assert changes(text) == set()


def test_every_mutant_of_our_own_code_is_another_program_that_parses() -> None:
    path = Path(__file__).resolve().parents[1] / "mutation" / "operators.py"
    source = path.read_bytes()
    plain = ast.dump(ast.parse(source))
    mutants = find_mutants("operators.py", source)
    assert len(mutants) > 50
    for mutant in mutants[::10]:
        assert ast.dump(ast.parse(mutant.apply(source))) != plain, mutant
        assert mutant.before != mutant.after


def test_tests_that_run_a_line_come_fast_ones_first_and_files_take_turns() -> None:
    seconds = {"x::a[1]": 0.1, "x::a[2]": 0.2, "x::b": 3.0, "x::c": 9.0, "x::d": 0.1, "y::e": 0.4, "y::f": 0.5}
    lines = LineMap(seconds)
    every: dict[str, set[int]] = {test: {2} for test in seconds}
    lines.lines["x.py"] = every | {"x::a[1]": {1, 2}, "x::d": {7}}

    def chosen(
        first: int, last: int, *, at_import: bool = False, budget_seconds: float = 5.0, own: Collection[str] = ()
    ) -> list[str]:
        wanted = range(first, last + 1)
        return lines.tests_of("x.py", wanted, at_import=at_import, budget_seconds=budget_seconds, own=own)

    assert chosen(2, 2) == ["x::a[1]", "y::e", "y::f", "x::b", "x::a[2]"], "c is too long"
    assert chosen(2, 2, budget_seconds=100.0) == ["x::a[1]", "y::e", "y::f", "x::b", "x::c", "x::a[2]"]
    assert chosen(2, 2, own={"x"}) == ["x::a[1]", "x::b", "x::a[2]", "y::e", "y::f"]
    assert chosen(3, 6) == []
    assert chosen(3, 6, at_import=True) == ["x::a[1]", "y::e", "x::d", "y::f", "x::b", "x::a[2]"], (
        "any of the file"
    )

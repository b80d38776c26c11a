"""The gate: which tests are in it, and what becomes of a red one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine_watch import LEFT_BEHIND
from tests.results import read_results
from tests.selection import leaves

REPOSITORY = Path(__file__).parents[2]
ONCE = """
from pathlib import Path

def test_passes_at_the_second_try():
    tried = Path(__file__).with_suffix(".tried")
    if not tried.exists():
        tried.touch()
        raise AssertionError("the first try")
"""
FULL, SOME, MOST = (
    pytest.mark.full("slow"),
    pytest.mark.full_cases("int8"),
    pytest.mark.gate_cases("int8", "2-x=[1]"),
)


@pytest.mark.parametrize(
    ("case", "marks", "left"),
    [
        ("", [FULL], True),
        ("2", [FULL], True),
        ("2", [pytest.mark.alone], False),
        ("int8", [SOME], True),
        ("int8-2", [SOME], False),
        ("int8", [MOST], False),
        ("2-x=[1]", [MOST], False),
        ("int4", [MOST], True),
        ("int8", [MOST, SOME], True),
        ("", [], False),
    ],
)
def test_what_the_gate_leaves_out(case: str, marks: list[pytest.MarkDecorator], left: bool) -> None:
    assert leaves(case, [each.mark for each in marks]) is left


CASES = """
import pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("x", ["a", "b", "c[1]"])
def test_x(x):
    pass
"""


@pytest.mark.parametrize(
    ("mark", "counts", "said"),
    [
        ("full('slow')", "0 1", ""),
        ("gate_cases('a')", "1 2", ""),
        ("full_cases('a', 'c[1]')", "1 2", ""),
        ("full('why not')", "", "expected one of busy, slow"),
        ("full", "", "expected one of busy, slow"),
        ("gate_cases('a', 'd')", "", "cases that are not there: test_x.py::test_x[d]"),
    ],
)
def test_marks_are_obeyed_and_checked(tmp_path: Path, mark: str, counts: str, said: str) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.selection import mark_full\n"
        "def pytest_collection_modifyitems(config, items):\n    mark_full(items, all_cases=True)\n"
    )
    markers = "".join(f"\n  {name}: x" for name in ("full", "gate_cases", "full_cases"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers ={markers}\n")
    (tmp_path / "test_x.py").write_text(CASES.format(mark=mark))
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full"]
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if said:
        assert said in done.stderr + done.stdout
        return
    passed, left = counts.split()
    assert (f"{passed} passed" in done.stdout) == (passed != "0"), done.stdout
    assert f"{left if passed != '0' else 3} deselected" in done.stdout, done.stdout


def gate(directory: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the gate of a repository that has these tests."""
    (directory / "tests").mkdir()
    for name in ("__init__.py", "run.py", "results.py"):
        shutil.copy(REPOSITORY / "tests" / name, directory / "tests" / name)
    for name, text in files.items():
        path = directory / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  full: f\n  alone: a\n")
    here = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "tests.run", "--workers", "0"], cwd=directory, env=here, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_a_red_test_of_real_processes_gets_a_second_try_and_is_named(tmp_path: Path) -> None:
    done = gate(tmp_path, {"ranks/test_a.py": ONCE, "ranks/test_b.py": "def test_b(): pass\n"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flaky: tests/ranks/test_a.py::test_passes_at_the_second_try\n1 flaky, 1 passed in" in done.stdout
    verdicts = {each.name: each.verdict for each in read_results(tmp_path / "build" / "tests.tsv")}
    assert sorted(verdicts.values()) == ["flaky", "passed"]


def test_a_unit_test_has_one_try_and_twice_red_is_red(tmp_path: Path) -> None:
    red = "def test_red(): raise AssertionError\n"
    left = "import pytest\n@pytest.mark.full\ndef test_left(): raise AssertionError\n"
    done = gate(tmp_path, {"unit/test_a.py": ONCE, "ranks/test_b.py": red, "ranks/test_c.py": left})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: tests/unit/test_a.py::test_passes_at_the_second_try" in done.stdout
    assert "failed: tests/ranks/test_b.py::test_red" in done.stdout
    assert "test_left" not in done.stdout


@pytest.mark.full("further")
def test_a_flaky_test_hides_nothing_that_was_left_behind(tmp_path: Path) -> None:
    hook = f"def pytest_sessionfinish(session):\n    session.exitstatus = {LEFT_BEHIND}\n"
    done = gate(tmp_path, {"ranks/test_a.py": ONCE, "ranks/conftest.py": hook})
    assert "flaky: tests/ranks/test_a.py" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1


@pytest.mark.full("further")
def test_a_gate_without_tests_is_red(tmp_path: Path) -> None:
    left = "import pytest\n@pytest.mark.full\ndef test_left(): pass\n"
    assert gate(tmp_path, {"ranks/test_a.py": left}).returncode == 1


@pytest.mark.full("further")
def test_a_session_that_breaks_is_red(tmp_path: Path) -> None:
    done = gate(tmp_path, {"ranks/test_a.py": "import there_is_no_such_module\n"})
    assert done.returncode == 1
    assert "pytest itself ended with" in done.stdout

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
from tests.selection import TABLE, Selection, read_selection

REPOSITORY = Path(__file__).parents[2]
ONCE = """
from pathlib import Path

def test_passes_at_the_second_try():
    tried = Path(__file__).with_suffix(".tried")
    if not tried.exists():
        tried.touch()
        raise AssertionError("the first try")
"""
SELECTION = Selection(
    {
        "leave": [{"why": "-", "tests": ["tests/a.py::slow", "tests/a.py::some[int8]", "tests/whole.py"]}],
        "represent": [{"why": "-", "test": "tests/a.py::matrix", "cases": ["int8", "2-topk:0.1,x=[1]"]}],
    }
)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("tests/a.py::slow", True),
        ("tests/a.py::slow[2]", True),
        ("tests/a.py::slower", False),
        ("tests/a.py::some[int8]", True),
        ("tests/a.py::some[int8-2]", False),
        ("tests/whole.py::any", True),
        ("tests/whole.pyx::any", False),
        ("tests/a.py::matrix[int8]", False),
        ("tests/a.py::matrix[2-topk:0.1,x=[1]]", False),
        ("tests/a.py::matrix[int4]", True),
    ],
)
def test_what_the_gate_leaves_out(name: str, left: bool) -> None:
    assert SELECTION.leaves(name) is left


def test_rows_that_name_nothing_are_found() -> None:
    names = ["tests/a.py::slow[2]", "tests/a.py::matrix[int8]"]
    assert SELECTION.stale(names) == ["tests/a.py::some[int8]", "tests/a.py::matrix[2-topk:0.1,x=[1]]"]


def test_every_group_of_rows_has_a_reason(tmp_path: Path) -> None:
    read_selection(TABLE)
    (tmp_path / "gate.toml").write_text('represent = []\n[[leave]]\ntests = ["a"]\n')
    with pytest.raises(AssertionError, match="no reason"):
        read_selection(tmp_path / "gate.toml")


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


def test_a_flaky_test_hides_nothing_that_was_left_behind(tmp_path: Path) -> None:
    hook = f"def pytest_sessionfinish(session):\n    session.exitstatus = {LEFT_BEHIND}\n"
    done = gate(tmp_path, {"ranks/test_a.py": ONCE, "ranks/conftest.py": hook})
    assert "flaky: tests/ranks/test_a.py" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1


def test_a_gate_without_tests_is_red(tmp_path: Path) -> None:
    left = "import pytest\n@pytest.mark.full\ndef test_left(): pass\n"
    assert gate(tmp_path, {"ranks/test_a.py": left}).returncode == 1


def test_a_session_that_breaks_is_red(tmp_path: Path) -> None:
    done = gate(tmp_path, {"ranks/test_a.py": "import there_is_no_such_module\n"})
    assert done.returncode == 1
    assert "pytest itself ended with" in done.stdout

"""`horovod.tensorflow` on two ranks: with the kernel in C++, and by Python functions without a compiler.

One test plays all checks of `tensorflow_script`: to begin the job costs more than all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.keras_jobs import finish, needs_compiler, needs_tensorflow, start

pytestmark = [needs_tensorflow, pytest.mark.timeout(300)]
CHECKS = 48
"""How many there are: a job that played fewer has not played all."""


def play(folder: Path, native: str) -> None:
    """Raise AssertionError with the tracebacks of the checks that failed."""
    results = folder / "results.json"
    told: dict[str, str] = finish(start("tensorflow_script", results, ranks=2, FARANDOLE_NATIVE=native), results)
    failed = [f"{check}\n{text}" for check, text in told.items() if text]
    assert not failed, "\n".join(failed)
    assert len(told) == CHECKS, sorted(told)


@needs_compiler
def test_operations_on_two_ranks(tmp_path: Path) -> None:
    play(tmp_path, "1")


def test_operations_on_two_ranks_without_a_compiler(tmp_path: Path) -> None:
    play(tmp_path, "0")

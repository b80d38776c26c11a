"""`horovod.tensorflow` on two ranks: with the kernel in C++, and by Python functions without a compiler.

One test plays all checks of `tensorflow_script`: to begin the job costs more than all of them. The gate has a test
of some.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.keras_jobs import finish, needs_compiler, needs_tensorflow, start

pytestmark = [needs_tensorflow, pytest.mark.timeout(300)]
CHECKS = 47
"""How many there are: a job that played fewer has not played all."""
SOME = (
    "reductions", "allgather_of_other_numbers_of_rows", "broadcast", "alltoall", "reducescatter", "tape",
    "ranks_that_disagree", "bad_input",
)  # fmt: skip


def play(folder: Path, native: str, checks: tuple[str, ...] = ()) -> None:
    """Play `checks`, all if there are none; raise AssertionError with the tracebacks of those that failed."""
    results = folder / "results.json"
    job = start("tensorflow_script", results, *checks, ranks=2, FARANDOLE_NATIVE=native)
    told: dict[str, str] = finish(job, results)
    failed = [f"{check}\n{text}" for check, text in told.items() if text]
    assert not failed, "\n".join(failed)
    assert len(told) == (len(checks) or CHECKS), sorted(told)


@pytest.mark.full("slow")
def test_the_main_operations(tmp_path: Path) -> None:
    play(tmp_path, "0", SOME)


@pytest.mark.full("slow")
@needs_compiler
def test_operations_on_two_ranks(tmp_path: Path) -> None:
    play(tmp_path, "1")


@pytest.mark.full("slow")
def test_operations_on_two_ranks_without_a_compiler(tmp_path: Path) -> None:
    play(tmp_path, "0")

"""Random training programs (`tests/programs`): ranks together do what one process does.

A failure prints the program; ``python benchmarks/generated_programs.py --seeds 17:18 --shrink`` plays it again and
takes away what it does not need. The benchmark plays thousands.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.programs.judge import play_rank, verdict
from tests.programs.program import Program, draw, draw_sharded
from tests.ranks.pool import ranks, takes

PROGRAMS = 100
"""Each seed is another combination of model, loop and plan; in the gate are 12 of them."""
SHARDED_PROGRAMS = 60
NEW_PROGRAMS = 20
"""Of other seeds every day, for `make test-all`: on one day a second try plays the same."""


@ranks(2)
@takes(120)
def _on_two(program: Program, folder: str) -> None:
    play_rank(program, Path(folder))


@ranks(3)
@takes(120)
def _on_three(program: Program, folder: str) -> None:
    play_rank(program, Path(folder))


def play_on_ranks(program: Program, folder: Path) -> None:
    """Play `program` on as many ranks as it says; each writes its outcome below `folder`."""
    (_on_two if program.ranks == 2 else _on_three)(program=program, folder=str(folder))


def check(program: Program, folder: Path) -> None:
    """Play `program` on its ranks and in one process; say which program it was if they differ."""
    play_on_ranks(program, folder)
    wrong = verdict(program, folder)
    assert not wrong, f"seed {program.seed}: {program.changes()}\n{wrong}"


@pytest.mark.gate_cases("0", "1", "2", "3", "4", "5", "6")
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_ranks_do_what_one_process_does(seed: int, tmp_path: Path) -> None:
    check(draw(seed), tmp_path)


@pytest.mark.gate_cases("0", "1", "2", "3", "4", "5")
@pytest.mark.parametrize("seed", range(SHARDED_PROGRAMS))
def test_ranks_with_shards_do_what_one_process_does(seed: int, tmp_path: Path) -> None:
    check(draw_sharded(seed), tmp_path)


@pytest.mark.full("random")
@pytest.mark.parametrize("number", range(NEW_PROGRAMS))
def test_programs_of_new_seeds(number: int, tmp_path: Path) -> None:
    check((draw, draw_sharded)[number % 2](int(time.time() // 86_400) * 1000 + number), tmp_path)

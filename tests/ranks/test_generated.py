"""Random training programs (`tests/programs`): ranks together do what one process does.

A failure prints the program; ``python benchmarks/generated_programs.py --seeds 17:18 --shrink`` plays it again and
takes away what it does not need. The benchmark plays thousands.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.judge import play_rank, verdict
from tests.programs.program import Program, draw, draw_sharded
from tests.ranks.pool import ranks, takes

PROGRAMS = 100
SHARDED_PROGRAMS = 60


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


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_ranks_do_what_one_process_does(seed: int, tmp_path: Path) -> None:
    program = draw(seed)
    play_on_ranks(program, tmp_path)
    wrong = verdict(program, tmp_path)
    assert not wrong, f"{program.changes()}\n{wrong}"


@pytest.mark.parametrize("seed", range(SHARDED_PROGRAMS))
def test_ranks_with_shards_do_what_one_process_does(seed: int, tmp_path: Path) -> None:
    program = draw_sharded(seed)
    play_on_ranks(program, tmp_path)
    wrong = verdict(program, tmp_path)
    assert not wrong, f"{program.changes()}\n{wrong}"

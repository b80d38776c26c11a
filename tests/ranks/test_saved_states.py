"""Generated programs of checkpoints (`tests.programs.saved_states`): nothing of a training is ever lost.

What fails is in the message with its seed: ``python -m tests.programs.saved_states DIR --seeds 17:18`` plays it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import warm
from tests.ranks.pool import patient

ROOT = Path(__file__).resolve().parents[2]
FEW, MANY = 10, 500
"""Programs a test: 50 in the gate, 2,000 more with `make test-all`."""


def play(folder: Path, first: int, count: int, seconds: float) -> None:
    words = ["-m", "tests.programs.saved_states", str(folder / "work"), "--seeds", f"{first}:{first + count}"]
    with (folder / "said").open("w") as said:
        job = warm.start(ROOT, *words, out=said, err=said)
    assert job.wait(seconds) == 0, (folder / "said").read_text()
    found = json.loads((folder / "said").read_text().splitlines()[-1])
    assert found == {"programs": count, "faults": []}


@pytest.mark.full_cases("0", "1", "2", "3", "4")
@patient
@pytest.mark.parametrize("block", range(5))
def test_trainings_that_are_killed_or_damaged_go_on_in_any_world(block: int, tmp_path: Path) -> None:
    play(tmp_path, block * FEW, FEW, 120)


@pytest.mark.full("slow")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("block", range(4))
def test_many_trainings_that_are_killed_or_damaged_go_on_in_any_world(block: int, tmp_path: Path) -> None:
    play(tmp_path, 150 + block * MANY, MANY, 1400)


@pytest.mark.gate_cases("735")
@patient
@pytest.mark.parametrize("seed", [735, 2010])
def test_a_buffer_of_one_element_with_a_stride_is_spread_to_all_ranks(seed: int, tmp_path: Path) -> None:
    """Found by these programs: `fd.distribute` ended in torch's error about its stride."""
    play(tmp_path, seed, 1, 60)

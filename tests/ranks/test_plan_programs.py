"""Random programs of plans (`tests.programs.plans`): layouts train as one process does, or are refused by name.

What fails is in the message with the command that plays it alone, such as
``python -m tests.programs.plans --seed 17 --set layers=1``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.ranks.pool import patient

ROOT = Path(__file__).resolve().parents[2]
NEW_PROGRAMS = 400
"""Of other seeds every day, for `make test-all`: on one day a second try plays the same."""


FOUND = {
    "a micro-batch of one sample, whose graph has fewer parts": (
        "mix=mha loop=step ragged=true first.ranks=4 first.pipeline=2 first.schedule=zb-h1 first.micro_batches=4 "
        'first.pipeline_cuts=["blocks.1"] first.zero=2'
    ),
    "a branch that begins at zero, divided by tokens and by heads": (
        "zero_branches=true first.ranks=4 first.context=2 first.tensor=2 "
        'first.tensor_recipe={"*.query":"columns","*.key":"columns","*.value":"columns","*.out":"rows"}'
    ),
    "frozen weights in few bits, in a pipeline that measures its layers": (
        "adapters=true single=true loop=step frozen=words.*|*norm*|blocks.*weight|blocks.*bias "
        "first.pipeline=2 first.frozen_codec=int8"
    ),
    "a penalty on parameters of a single row, in shards": "scale=true penalty=0.05 first.zero=3",
    "and of fewer rows than ranks": "heads=4 head_norms=true penalty=0.05 first.ranks=4 first.zero=3",
    "a penalty that is zero at some parameters, in passes that are held": (
        "penalty=0.05 first.zero=3 passes=2 accumulate=loop"
    ),
    "a number that the loop changes, in the recorded code of a pipeline": (
        'warms=true loop=step first.pipeline=2 first.micro_batches=2 first.pipeline_cuts=["blocks.1"]'
    ),
    "and between two batches, with a buffer that backward needs": (
        "warms=true buffer=true loop=step first.pipeline=2 first.micro_batches=2 first.weight_versions=2 "
        'first.pipeline_cuts=["blocks.1"]'
    ),
}
"""What these programs have found, made small."""


def play(folder: Path, seconds: float, *options: str) -> dict[str, Any]:
    """Play programs, all of which must be good; return the figures."""
    words = ["-m", "tests.programs.plans", *options]
    with (folder / "said").open("w") as said:
        job = warm.start(ROOT, *words, out=said, err=said)
    assert job.wait(seconds) == 0, (folder / "said").read_text()
    found: dict[str, Any] = json.loads((folder / "said").read_text().splitlines()[-1])
    return found


def play_many(folder: Path, first: int, count: int, seconds: float) -> None:
    """Play programs of seeds, of which enough must be right."""
    found = play(folder, seconds, "--seeds", f"{first}:{first + count}")
    assert found["programs"] == count
    assert found["right"] >= 0.7 * count, f"too many are refused: {found}"


@pytest.mark.full_cases(
    "a micro-batch of one sample, whose graph has fewer parts",
    "a penalty on parameters of a single row, in shards",
    "a number that the loop changes, in the recorded code of a pipeline",
    "frozen weights in few bits, in a pipeline that measures its layers",
)
@patient
@pytest.mark.parametrize("what", FOUND)
def test_what_was_wrong_once(what: str, tmp_path: Path) -> None:
    found = play(tmp_path, 60, "--seed", "0", "--plain", "--set", *FOUND[what].split())
    assert found.get("right") == 1, (tmp_path / "said").read_text()


@pytest.mark.gate_cases("0")
@patient
@pytest.mark.parametrize("block", range(8))
def test_plans_train_as_one_process(block: int, tmp_path: Path) -> None:
    play_many(tmp_path, block * 5, 5, 120)


@pytest.mark.full("random")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("block", range(4))
def test_plans_of_new_seeds(block: int, tmp_path: Path) -> None:
    count = NEW_PROGRAMS // 4
    play_many(tmp_path, int(time.time() // 86_400) * 1000 + block * count, count, 1400)

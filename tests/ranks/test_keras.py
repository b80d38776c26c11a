"""A Keras script with `fit`, unchanged, on two ranks: it trains what one process trains on the joined batches.

One test plays all cases of a backend: to begin the jobs costs more than all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.events import STEP_PHASES
from farandole.observe.records.run_reader import read_run
from tests.ranks.keras_jobs import (
    finish,
    has_compiler,
    needs_keras,
    needs_tensorflow,
    needs_tf_keras,
    start,
)

pytestmark = [needs_keras, pytest.mark.timeout(500)]
CASES = {"tensorflow": 9, "torch": 4, "tf_keras": 11}
"""How many trainings there are: a job that played fewer has not played all."""


def play(
    script: str, folder: Path, *options: str, backend: str = "tensorflow", **variables: str
) -> tuple[Any, Any]:
    """Return the results of one process, and of two ranks."""
    one, ranks = folder / "one.json", folder / "ranks.json"
    keras: dict[str, Any] = {"TF_USE_LEGACY_KERAS": "1"} if backend == "tf_keras" else {"KERAS_BACKEND": backend}
    keras |= variables
    jobs = [start(script, ranks, "ranks", ranks=2, options=options, **keras), start(script, one, "one", **keras)]
    try:
        found = [finish(job, path) for job, path in zip(jobs, (ranks, one), strict=True)]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    return found[1], found[0]


@pytest.mark.full("slow")
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("tensorflow", marks=needs_tensorflow),
        "torch",
        pytest.param("tf_keras", marks=[needs_tensorflow, needs_tf_keras]),
    ],
)
def test_two_ranks_train_what_one_process_does(backend: str, tmp_path: Path) -> None:
    one, ranks = play("keras_script", tmp_path, backend=backend)
    assert len(one) == CASES[backend]
    require_same_trainings(one, ranks)
    require_warm_up(ranks["warm-up"])
    if backend in ("tensorflow", "torch"):
        require_records(tmp_path / "ranks.json.run", list(one), backend)
    assert ranks.get("normalised", 0.0) < 1e-5
    if backend == "torch":
        assert ranks["accumulated"]["exchanges"] == ranks["sgd"]["exchanges"] // 2 == 10
    assert ranks["kept"]["changed"]
    assert ranks["kept"]["same"]
    assert ranks["kept"]["batch"] == 3
    saved = ranks["saved"]
    assert saved["plain"], "a saved model loads without us"
    assert saved["distributed"]
    assert saved["kind"][0] == "Adam"
    assert len(set(saved["steps"])) == 1
    assert saved["steps"][0] > 0


@pytest.mark.full("slow")
@needs_tensorflow
def test_the_main_trainings(tmp_path: Path) -> None:
    one, ranks = play("keras_script", tmp_path, TRAININGS="some")
    assert len(one) == 3
    require_same_trainings(one, ranks)
    assert ranks["saved"]["plain"], "a saved model loads without us"
    assert ranks["kept"]["same"]
    require_warm_up(ranks["warm-up"])


@pytest.mark.full("further")
@needs_tensorflow
def test_a_rank_that_is_lost_leaves_the_same_training(tmp_path: Path) -> None:
    one, ranks = play("keras_elastic_script", tmp_path, "--min-np", "1")
    assert ranks["sizes"] == [2] * 5 + [1] * 5
    assert ranks["steps"] == one["steps"] == 10
    require_equal_weights("elastic", ranks, one)


def require_same_trainings(one: dict[str, Any], ranks: dict[str, Any]) -> None:
    for case, alone in one.items():
        require_equal_weights(case, ranks[case], alone)
        assert ranks[case].get("kind") == alone.get("kind"), case
        assert ranks[case].get("loss") == pytest.approx(alone.get("loss"), abs=1e-5), case
    assert ranks["equal"], "ranks hold the same bits"


def require_equal_weights(case: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for place, (a, b) in enumerate(zip(mine["weights"], theirs["weights"], strict=True)):
        assert a == pytest.approx(b, abs=1e-5), f"{case}: weight {place}"


def require_records(run: Path, cases: Sequence[str], backend: str) -> None:
    """Every step of every training, and what is known of them."""
    for timeline in read_run(run).timelines:
        rows = timeline.steps
        assert timeline.setup["front_end"] == f"keras on {backend}"
        if backend == "tensorflow" and not has_compiler():
            continue
        begin = 0
        for case in cases:
            steps = 10 if case == "accumulated" else 20
            own = rows[begin + 1 : begin + steps]  # the first one has what was before it
            begin += steps
            assert [len(row.exchanges) for row in own] == [1] * len(own), case
            assert all(row.exchanges[0].sent_bytes > 0 for row in own), case
            names = {tuple(phase.name for phase in row.phases if phase.name in STEP_PHASES) for row in own}
            assert case == "several steps" or all(row.loss is not None for row in own), case
            if case == "accumulated":
                assert all({"data", "forward", "backward"} <= set(each) for each in names), case
                continue
            if case == "several steps":
                assert all("backward" in each and {"data", "undivided"} & set(each) for each in names), case
            else:
                assert names == {("data", "forward", "backward", "optimizer")}, case
            assert {row.samples for row in own} == {8}, case


def require_warm_up(found: dict[str, list[float]]) -> None:
    """Two epochs of warm-up, one at the full rate, the first of the schedule at it too, and one at a tenth."""
    size, rate, steps, warm = 2, 0.08, 2, 2
    expected = [
        rate * ((number / steps + 1 / steps) * (size - 1) / warm + 1) / size for number in range(warm * steps)
    ]
    expected += [rate] * steps + [rate] * steps + [rate * 0.1] * steps
    assert found["rates"] == pytest.approx(expected, rel=1e-6)
    assert found["logs"] == pytest.approx(expected[steps - 1 :: steps], rel=1e-6)

"""Trainings of Keras on two ranks: their warnings, the seeds of each rank, and what ``farandole verify`` says.

One test plays all cases of a backend: to begin the job costs more than all of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.keras_jobs import (
    ROOT,
    environment,
    finish,
    is_installed,
    needs_keras,
    needs_tensorflow,
    start,
)

pytestmark = [pytest.mark.full("slow"), needs_keras, pytest.mark.timeout(300)]
BACKENDS = [pytest.param("tensorflow", marks=needs_tensorflow), "torch"]
ANSWERS: dict[str, dict[str, tuple[str, str]]] = {
    # of a case: checks that are not "ok", with their word and a part of what is said
    "right": {},
    "same samples": {"batches": ("FAIL", "ranks 0 and 1 saw the same samples in step 1")},
    "other weights": {"weights": ("FAIL", "'dense/kernel' (and 1 more) differs on ranks 0 and 1 (no majority)")},
    "not distributed": {
        "gradients": ("FAIL", "no gradients were exchanged: each rank trains a model of its own"),
    },
    "own loop": {"batches": ("not checked", "the loop is not model.fit")},
    "own loop, other weights": {
        "weights": ("FAIL", "'dense/kernel' (and 1 more) differs on ranks 0 and 1 (no majority)"),
        "batches": ("not checked", "the loop is not model.fit"),
    },
    "kept on each rank": {},
    "eager": {},
    "passes": {},
    "added by Keras": {},
}
if is_installed("tf_keras"):
    ANSWERS |= {"tf_keras": {}, "tf_keras, same samples": ANSWERS["same samples"]}
CASES = {
    "tensorflow": ANSWERS,
    "torch": {name: ANSWERS[name] for name in ("right", "same samples", "other weights")},
}
ALWAYS = {
    "gradients of one process": (
        "not checked",
        "of trainings with TensorFlow and Keras, weights and samples are compared",
    )
}
MARKS = {True: "ok", False: "FAIL", None: "not checked"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_by_fit_is_watched_and_verified(backend: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    job = start("keras_watch_script", results, ranks=2, KERAS_BACKEND=backend)
    try:
        found = finish(job, results)
    finally:
        job.kill()
        job.wait()
    require_warnings(found.pop("warned"))
    assert [each["said"] for each in found.pop("quiet")] == ["", ""]
    assert sorted(found) == sorted(CASES[backend])
    for name, answer in found.items():
        require_answers(name, answer, CASES[backend][name] | ALWAYS)
    right = {check["name"]: check["answer"] for check in found["right"]["checks"]}
    assert right["weights"] == "the same bits on all ranks (4 tensors, 41 numbers)"
    assert right["batches"] == "different on every rank in 3 steps"


def require_warnings(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["weights"] == second["weights"], "equal seeds, equal weights"
    masks = [sum(map(sum, each["masks"])) for each in ranks]
    assert all(0 < kept < 8 * 16 for kept in masks), "half is dropped"
    assert first["masks"] != second["masks"], "equal seeds, and masks of each rank"
    assert second["said"] == "", "rank 0 speaks for all"
    lines = first["said"].splitlines()
    assert len(lines) == 2, lines
    assert "ranks 0 and 1 trained on the same first batch" in lines[0]
    assert lines[0].endswith("divide the samples: dataset = farandole.keras.shard(dataset)")
    assert "after step 8 the ranks no longer train one model: their learning rates differ: 0.05" in lines[1]
    assert "0.03125 on rank 1" in lines[1]
    assert lines[1].endswith("put hvd.callbacks.MetricAverageCallback() before the callback that decides")


def require_answers(name: str, answer: dict[str, Any], expected: dict[str, tuple[str, str]]) -> None:
    assert answer["ended"], f"{name}: it is stopped after the steps that are asked for"
    told = {
        check["name"]: (check["word"] or MARKS[check["passed"]], check["answer"]) for check in answer["checks"]
    }
    odd = {check: word for check, (word, _) in told.items() if word != "ok"}
    assert odd == {check: word for check, (word, _) in expected.items()}, (name, told)
    for check, (_, part) in expected.items():
        assert part in told[check][1], (name, told[check])
    assert answer["passed"] == ("FAIL" not in odd.values()), name


SCRIPT = """\
import numpy as np
import keras
import horovod.keras as hvd

hvd.init()
x = np.random.default_rng(hvd.rank()).normal(size=(64, 6)).astype("float32")
model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
model.fit(x, x.sum(1), batch_size=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
print("it went on to its end")
"""


def test_the_command_takes_a_script_of_keras(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["verify", "--as-horovod", "-np", "2", "--steps", "2", "--", sys.executable, "train.py"]
    result = subprocess.run(
        [sys.executable, "-m", "farandole", *words], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
        env=environment(tmp_path, KERAS_BACKEND="torch", PYTHONPATH=str(ROOT / "src")),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "it went on" not in result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "         ok  weights: the same bits on all ranks (2 tensors, 7 numbers)" in lines
    assert lines[-1] == "In order, but for 1 thing to know.", "gradients are not compared"

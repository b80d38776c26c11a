"""The classic script on generated images: two ranks train what one process does at the same global batch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.ranks.keras_jobs import FOLDER, MOST_SECONDS, ROOT, Job, needs_tensorflow

EXAMPLE = ROOT / "examples" / "keras_resnet50.py"
OURS = "import farandole.horovod.tensorflow.keras as hvd"
THEIRS = "import horovod.tensorflow.keras as hvd"
EPOCH = re.compile(
    r"Epoch (\d): [\d.]+ s, loss ([\d.]+), accuracy ([\d.]+), validation loss ([\d.]+), accuracy ([\d.]+)"
)
FIGURES = ("Time of an epoch: ", "Images a second: ", "Total: ", "Validation accuracy: ")
pytestmark = [pytest.mark.full("slow"), needs_tensorflow, pytest.mark.timeout(3 * MOST_SECONDS)]


def start(
    folder: Path, name: str, images: Path, *words: str, ranks: int, imports: tuple[str, ...] = ()
) -> tuple[Job, Path]:
    """Begin a training, and return where it writes what it says.

    Of one process our import, of several theirs, unchanged but for `--as-horovod`. `imports`: see `warm.start`;
    without any, processes import all by themselves, in the script's order.
    """
    work = folder / name
    work.mkdir(exist_ok=True)
    script, launcher = EXAMPLE, []
    number = len(list(folder.glob("said-*")))
    if ranks > 1:
        text = EXAMPLE.read_text()
        assert text.count(OURS) == 1
        script = folder / EXAMPLE.name
        script.write_text(text.replace(OURS, THEIRS))
        records = folder / f"run-{number}"
        launcher = ["-m", "farandole", "run", "--as-horovod", "-np", str(ranks), "--run-dir", str(records), "--"]
        launcher += [sys.executable]
    model = ["--model", "tiny", "--image-size", "20", "--classes", "3", "--wd", "0"]
    places = ["--train-dir", str(images / "train"), "--val-dir", str(images / "val"), "--generate", "96"]
    variables = {
        "KERAS_BACKEND": "tensorflow",
        "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_HOME": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    command = [*launcher, str(script), *places, *model, *words]
    said = folder / f"said-{number}"
    with said.open("w") as out:
        if imports:
            return warm.start(work, *command, out=out, err=out, environment=variables, imports=imports), said
        environment = {**os.environ, **variables}
        return subprocess.Popen(
            [sys.executable, *command], cwd=work, text=True, stdout=out, stderr=out, env=environment
        ), said


def finish(job: Job, said: Path) -> str:
    code = job.wait(MOST_SECONDS)
    assert code == 0, said.read_text()
    return said.read_text()


def test_two_ranks_train_what_one_process_does_and_resume(tmp_path: Path) -> None:
    words = ["--base-lr", "0.1", "--batch-size", "12", "--epochs", "2", "--warmup-epochs", "0"]
    alone = ["--base-lr", "0.2", "--batch-size", "24", "--epochs", "2", "--warmup-epochs", "0"]
    jobs = [
        start(tmp_path, "one", tmp_path / "a", *alone, ranks=1, imports=("keras",)),
        start(tmp_path, "two", tmp_path / "b", *words, ranks=2),
    ]
    try:
        one, two = (finish(job, said) for job, said in jobs)
        assert [path.name for path in (tmp_path / "two").glob("*.keras")] == [
            "checkpoint-1.keras",
            "checkpoint-2.keras",
        ]
        words[5:] = ["3", "--warmup-epochs", "4", "--log-dir", "board"]
        jobs.append(start(tmp_path, "two", tmp_path / "b", *words, ranks=2, imports=("keras",)))
        resumed = finish(*jobs[-1])
    finally:
        for job, _ in jobs:
            job.kill()
            job.wait()
    mine, theirs = EPOCH.findall(two), EPOCH.findall(one)
    assert [found[0] for found in mine] == [found[0] for found in theirs] == ["1", "2"], two
    for a, b in zip(mine, theirs, strict=True):
        assert [float(each) for each in a] == pytest.approx([float(each) for each in b], abs=2e-4)
    for figure in FIGURES:
        assert two.count(figure) == 1, "rank 0 alone prints"
    assert "Resuming after epoch 2" in resumed
    last = EPOCH.findall(resumed)
    assert [found[0] for found in last] == ["3"]
    assert float(last[0][1]) < float(mine[0][1]), "it goes on where it was"
    if importlib.util.find_spec("tensorboard") is None:
        assert "TensorBoard is not installed" in resumed
    else:
        assert list((tmp_path / "two" / "board").rglob("events.*"))

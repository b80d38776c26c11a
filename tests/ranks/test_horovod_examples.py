"""Scripts as Horovod's users write them run on two ranks: by our import, and unchanged through the shim."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.cli.main import run as command
from tests import trace_format
from tests.unit.bench.test_data import FASHION
from tests.warm import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OURS = "import farandole.horovod.torch as hvd"
THEIRS = "import horovod.torch as hvd"
LIMIT_SECONDS = 80.0
"""Of one run, which takes about 8 s on two idle cores: most of it is the start of Python and torch."""
BOTH = pytest.mark.parametrize("as_horovod", [False, True], ids=["our import", "their import"])
pytestmark = [pytest.mark.timeout(3 * LIMIT_SECONDS), pytest.mark.full("further")]


def example(
    directory: Path, name: str, *words: str, as_horovod: bool, timeline: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run an example on two ranks; `as_horovod`: with the import line that it would have under Horovod."""
    path = EXAMPLES / name
    options = ["--timeline-filename", timeline] if timeline else []
    if as_horovod:
        text = path.read_text()
        assert text.count(OURS) == 1
        path = directory / name
        path.write_text(text.replace(OURS, THEIRS))
        options.append("--as-horovod")
    result = run(
        directory, "run", "-np", "2", *options, "--", sys.executable, str(path), *words, timeout=LIMIT_SECONDS
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's dataset-fashion-mnist")
@BOTH
def test_mnist_learns_and_all_ranks_report_one_accuracy(tmp_path: Path, as_horovod: bool) -> None:
    words = ["--images", "4000", "--epochs", "1", "--batch-size", "32", "--lr", "0.02"]
    words += ["--fp16-allreduce"] if as_horovod else []
    result = example(tmp_path, "horovod_mnist.py", *words, as_horovod=as_horovod)
    assert re.search(r"Train Epoch: 1 \[0/2000 \(0%\)\]\tLoss: 2\.\d+", result.stdout)
    accuracies = re.findall(r"Test set: Average loss: \d\.\d+, Accuracy: (\d+\.\d+)%", result.stdout)
    assert len(accuracies) == 1, "rank 0 alone prints"
    assert float(accuracies[0]) > 30, result.stdout


def test_imagenet_saves_after_each_epoch_and_resumes_under_the_other_import(tmp_path: Path) -> None:
    words = ["--image-size", "32", "--synthetic-images", "16", "--batch-size", "2", "--val-batch-size", "8"]
    words += ["--batches-per-allreduce", "2", "--classes", "10", "--warmup-epochs", "2", "--base-lr", "0.001"]
    first = example(tmp_path, "horovod_imagenet_resnet50.py", *words, "--epochs", "1", as_horovod=False)
    # Of a warm-up over two epochs from the rate of one rank to that of two, times two passes: half is done.
    assert re.search(r"^\S*\s?Epoch 1: lr 0\.00300, ", first.stdout, re.M), first.stdout
    assert [path.name for path in tmp_path.glob("*.tar")] == ["checkpoint-1.pth.tar"]
    second = example(tmp_path, "horovod_imagenet_resnet50.py", *words, "--epochs", "2", as_horovod=True)
    assert "Resuming after epoch 1" in second.stdout
    assert re.search(r"^\S*\s?Epoch 2: lr 0\.00400, ", second.stdout, re.M), second.stdout
    assert (tmp_path / "checkpoint-2.pth.tar").exists()
    for path in tmp_path.glob("*.tar"):
        path.unlink()  # 200 MB each


NUMBER = r"\d+\.\d"


@BOTH
def test_the_benchmark_prints_the_lines_that_tools_read(tmp_path: Path, as_horovod: bool) -> None:
    words = ["--model", "cnn", "--image-size", "32", "--batch-size", "4", "--no-cuda"]
    words += ["--num-warmup-batches", "2", "--num-batches-per-iter", "3", "--num-iters", "2"]
    result = example(
        tmp_path, "horovod_synthetic_benchmark.py", *words, as_horovod=as_horovod, timeline="timeline.json"
    )
    lines = [line.removeprefix("[0] ").removeprefix("[0]<stdout>:") for line in result.stdout.splitlines()]
    expected = [
        "Model: cnn", "Batch size: 4", r"Number of CPUs: 2", r"Running warmup\.\.\.", r"Running benchmark\.\.\.",
        rf"Iter #0: {NUMBER} img/sec per CPU", rf"Iter #1: {NUMBER} img/sec per CPU",
        rf"Img/sec per CPU: {NUMBER} \+-{NUMBER}", rf"Total img/sec on 2 CPU\(s\): {NUMBER} \+-{NUMBER}",
    ]  # fmt: skip
    found = [line for line in lines if any(re.fullmatch(pattern, line) for pattern in expected)]
    assert len(found) == len(expected), result.stdout
    check_timelines(tmp_path)


def check_timelines(directory: Path) -> None:
    """Every rank wrote a file that keeps the format, with broadcasts by name and every exchange of gradients."""
    paths = [directory / "timeline.json", directory / "timeline.rank1.json"]
    for path in paths:
        events = trace_format.check(path)
        names = trace_format.names(events)
        check_broadcast(trace_format.lane(events, "broadcast.0.0.weight"))
        whole = [name for name in names if name.startswith("gradients: ")]
        assert len(whole) == 1, names
        begun = [event["name"] for event in trace_format.lane(events, whole[0]) if event["ph"] == "B"]
        assert begun == ["ALLREDUCE", "WAIT"] * 8, "2 batches to warm up, 2 times 3"
        assert any(name.startswith("bucket 0: ") for name in names), names
    merged = directory / "all.json"
    assert command(["timeline", "merge", *map(str, paths), "-o", str(merged)]) == 0
    lanes = trace_format.names(trace_format.check(merged))
    assert {name.partition(":")[0] for name in lanes} == {"0", "1"}


def check_broadcast(lane: trace_format.Trace) -> None:
    """Both ranks were seen to be ready, whoever came first, and the phases lie within the operation."""
    ready = [event["name"] for event in lane if event["ph"] == "X"]
    assert sorted(ready) == ["0", "1"]
    begun = [event["name"] for event in lane if event["ph"] == "B"]
    assert begun[:2] == ["NEGOTIATE_BROADCAST", "BROADCAST"]
    assert "TCP_BROADCAST" in begun[2:]
    last = lane[-1]
    assert last["ph"] == "E"
    assert last["args"] == {"dtype": "float32", "shape": "[16, 3, 3, 3]"}, "the operation ends after its phases"

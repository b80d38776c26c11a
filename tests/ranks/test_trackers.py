"""`fd.log` live to trackers: the real packages, rank 0 alone, and no harm to the training."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole as fd
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp

STEPS = 3


def train(log_with: Any, run_dir: Path | None = None) -> None:
    """Log in each of `STEPS` steps, and leave."""
    world = fd.init(run_dir=run_dir, log_with=log_with, progress=False)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer)
    x, y = data(8)
    x = x + world.rank
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        fd.log(loss=loss, metrics={"square": step**2, "rank": torch.tensor(world.rank)})
        optimizer.step()
    fd.shutdown()


@ranks(1, 2)
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    rank = int(os.environ["FARANDOLE_RANK"])
    train("tensorboard", Path(tmp_path) / "run")
    if rank == 0:
        found = EventAccumulator(str(Path(tmp_path) / "run" / "tensorboard")).Reload()
        assert sorted(found.Tags()["scalars"]) == ["loss", "rank", "square"]
        assert [(each.step, each.value) for each in found.Scalars("square")] == [(1, 0), (2, 1), (3, 4)]
        assert {each.value for each in found.Scalars("rank")} == {0}


@pytest.mark.full("further")
@ranks(1, 2)
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    train({"mlflow": {"run_name": "one"}})
    if os.environ["FARANDOLE_RANK"] == "0":
        (run,) = mlflow.MlflowClient().search_runs(["0"])
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "square")
        assert [(each.step, each.value) for each in history] == [(1, 0), (2, 1), (3, 4)]
        assert (run.info.run_name, run.info.status) == ("one", "FINISHED")


@pytest.mark.full("further")
@ranks(1, 2)
def test_wandb_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    homes = ("HOME", "XDG_CACHE_HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
    os.environ.update({name: str(tmp_path) for name in homes}, WANDB_SILENT="true")
    train({"wandb": {"mode": "offline", "project": "words"}}, Path(tmp_path) / "run")
    assert wandb.run is None, "what was begun here is ended"
    if os.environ["FARANDOLE_RANK"] == "0":
        (log,) = (Path(tmp_path) / "run" / "wandb").glob("offline-run-*/run-*.wandb")
        content = log.read_bytes()
        assert content.count(b"square") >= STEPS
        assert b"loss" in content


class Broken:
    """A wandb run whose server is gone, or a writer on a full disk."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log(self, values: Any, step: int) -> None:
        self.seen.append((dict(values), step))
        raise OSError("no space left on device")

    def finish(self) -> None:
        raise AssertionError("it is not ours")


class Writer:
    """What a SummaryWriter takes."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.flushed = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1


@pytest.mark.gate_cases("1")
@ranks(1, 2)
def test_a_tracker_that_raises_is_left_out_and_the_others_go_on() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    broken, writer = Broken(), Writer()
    train([broken, writer])
    assert len(broken.seen) == (1 if rank == 0 else 0)
    squares = [(value, step) for name, value, step in writer.seen if name == "square"]
    assert squares == ([(0, 1), (1, 2), (4, 3)] if rank == 0 else [])
    assert writer.flushed == (1 if rank == 0 else 0)


@ranks(1, 2)
def test_wrong_trackers_and_metrics_are_refused_on_all_ranks() -> None:
    with pytest.raises(
        fd.ConfigError, match="log_with has 'tensorbord', expected 'tensorboard', 'wandb', 'mlflow'"
    ):
        fd.init(log_with="tensorbord")
    fd.shutdown()
    fd.init()
    for wrong, text in ((torch.ones(2), r"has shape \(2,\)"), ("x", "is 'x', expected a number")):
        with pytest.raises(fd.ConfigError, match=f"metric 'a' {text}"):
            fd.log(metrics={"a": wrong})  # type: ignore[dict-item]
    for count in (-1, 2.5, True, "8"):
        with pytest.raises(fd.ConfigError, match=f"samples = {count!r}, expected a whole number from 0"):
            fd.log(samples=count)  # type: ignore[arg-type]
    fd.log(metrics={"a": 1})  # nowhere to go, and no error


@pytest.mark.gate_cases("1")
@ranks(1, 2)
def test_without_a_tracker_metrics_are_in_the_run_directory(tmp_path: Path) -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    heard = io.StringIO()
    with redirect_stderr(heard):
        train(None, Path(tmp_path))
    assert "fd.log" not in heard.getvalue()
    if rank == 0:
        rows = [json.loads(line) for line in (Path(tmp_path) / "metrics.jsonl").read_text().splitlines()]
        values = {row["step"]: row["values"] for row in rows if row["kind"] == "metrics"}
        assert values[1] == {"square": 0.0, "rank": 0.0}
        assert values[STEPS]["square"] == (STEPS - 1) ** 2


@ranks(1, 2)
def test_metrics_that_go_nowhere_are_said_once_by_rank_0() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    heard = io.StringIO()
    with redirect_stderr(heard):
        train(None)
    assert heard.getvalue().count("the metrics given to fd.log are written nowhere") == (rank == 0)

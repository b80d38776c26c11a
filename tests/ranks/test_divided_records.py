"""What divided trainings on real ranks leave in their records: samples once, and exchanges with their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from farandole.observe.records.run_reader import read_run
from tests import warm

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


fd.init()
torch.manual_seed(0)
model = nn.Sequential(Block(), Block())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer = fd.distribute(model, optimizer)
data = TensorDataset(torch.randn(80, 16), torch.randn(80, 16))
for x, y in fd.shard(DataLoader(data, batch_size=8)):
    optimizer.zero_grad()
    fd.step(model, nn.functional.mse_loss, x, y)
    fd.log(tokens=x.numel())
    optimizer.step()
"""


@pytest.mark.gate_cases("tensor-1560")
@pytest.mark.parametrize(
    ("degree", "sent_bytes"),
    # A sum of 8 x 16 numbers for each block in each pass, but for the gradient of the input, which needs none; of
    # 2 ranks a ring sends as many bytes; then the mean loss. Or one border, there or back.
    [("tensor", 3 * 8 * 16 * 4 + 24), ("pipeline", 8 * 16 * 4)],
)
def test_samples_count_once_and_what_is_sent_is_counted(tmp_path: Path, degree: str, sent_bytes: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("-np", "2", "--run-dir", "run", "--set", f"{degree}=2")
    done = warm.run(tmp_path, "run", *options, "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 10
    assert summary["samples"] == 80, "each sample is one, however many ranks see it"
    assert summary["tokens_per_second"] == pytest.approx(16 * summary["samples_per_second"])
    assert summary["sent_bytes_per_step"] == pytest.approx(sent_bytes), "the mean of the ranks"
    assert summary["shares"]["communication"] + summary["shares"]["waiting"] > 0
    (timeline, _) = read_run(tmp_path / "run").timelines
    assert timeline.setup["degrees"] == ("1 1 1 1 1 2" if degree == "tensor" else "2 1 1 1 1 1")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        if row["kind"] == "step" and "samples_per_second" in row:
            assert row["samples_per_second"] * row["seconds"] == pytest.approx(8, rel=0.01)


@pytest.mark.full("further")
def test_the_wait_for_the_mean_loss_is_no_code_of_the_script(tmp_path: Path) -> None:
    """A late rank is waited for there, as no gradients are exchanged before: it was "your own code"."""
    held = (
        "time.sleep(0.05 * fd.world().rank)\n    with fd.accumulate():\n"
        "        fd.step(model, nn.functional.mse_loss, x, y)\n    fd.step("
    )
    (tmp_path / "train.py").write_text("import time\n" + SCRIPT.replace("fd.step(", held))
    done = warm.run(tmp_path, "run", "-np", "2", "--run-dir", "run", "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    first, second = (
        [row.inner_seconds["loss"] for row in each.steps] for each in read_run(tmp_path / "run").timelines
    )
    assert median(first) > 0.04, "it waits for the other"
    assert median(second) < 0.02


@pytest.mark.gate_cases("zero=2")
@pytest.mark.parametrize("setting", ["zero=1", "zero=2", "overlap_gather=true"])
def test_sharded_states_send_gradients_and_stepped_parameters(tmp_path: Path, setting: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("-np", "2", "--run-dir", "run", "--set", "zero=1", "--set", setting)
    done = warm.run(tmp_path, "run", *options, "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    whole = 2 * (2 * 16 * 32 + 32 + 16) * 4  # half of it each way, twice: gradients to owners, parameters to all
    assert summary["sent_bytes_per_step"] == pytest.approx(whole, rel=0.1), "but for padding"


def test_a_meeting_is_part_of_the_step_that_it_ends(tmp_path: Path) -> None:
    """It was counted with the step after it: the last one of a run nowhere."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("-np", "2", "--run-dir", "run", "--set", "sync=local:H=5")
    done = warm.run(tmp_path, "run", *options, "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    for timeline in read_run(tmp_path / "run").timelines:
        (row,) = [row for row in timeline.steps if row.exchanges]
        assert row.step == 5
        (optimizer,) = [phase for phase in row.phases if phase.name == "optimizer"]
        (meeting,) = row.exchanges
        assert optimizer.begin_seconds <= meeting.wait_begin_seconds
        assert meeting.wait_end_seconds <= optimizer.end_seconds, "and part of its optimizer.step()"


@pytest.mark.full("further")
def test_first_steps_that_exchange_gradients_are_no_missing_meetings(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = warm.run(
        tmp_path, "run", "-np", "2", "--run-dir", "run", "--set", "sync=post_local", "--", "python", "train.py"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["sent_bytes_per_step"] > 0
    assert not any("meeting" in note for note in summary["notes"])


@pytest.mark.full("further")
@pytest.mark.parametrize("setting", ["codec=int8", "weight_codec=int8", 'codec_for={"*"="int8"}'])
def test_codecs_that_change_nothing_in_one_host_are_told(tmp_path: Path, setting: str) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("16, 32", "64, 64").replace("32, 16", "64, 64").replace(", 16)", ", 64)")
    )
    options = ("-np", "2", "--run-dir", "run", "--set", "zero=1", "--set", setting)
    done = warm.run(tmp_path, "run", *options, "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "changes nothing here: at zero = 1" in line]
    assert f"{setting.partition('=')[0]} = " in line


@pytest.mark.gate_cases("zero=3-keys0")
@pytest.mark.parametrize(("plan", "keys"), [("zero=3", {"zero": 3}), ("codec='none'", {})])
def test_a_plan_of_the_script_is_recorded_by_the_keys_that_it_sets(
    tmp_path: Path, plan: str, keys: dict[str, object]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace("distribute(model, optimizer)", f"distribute(model, optimizer, fd.Plan({plan}))")
    )
    done = warm.run(tmp_path, "run", "-np", "2", "--run-dir", "run", "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run").script_plan == keys

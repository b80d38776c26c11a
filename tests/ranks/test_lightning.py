"""Lightning's Trainer: two ranks of our strategy train what one process of its own trains, to float rounding."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.core.vocabulary.events import DDP, LIGHTNING, SETUP_LOOP, SETUP_WRAPPER
from farandole.observe.records.run_reader import read_run
from tests import warm
from tests.ranks.front_ends import play_both

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is missing"),
    pytest.mark.full("slow"),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    return play_both("lightning_script", tmp_path_factory.mktemp("lightning"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["plain", "accumulated", "uneven", "manual", "manual, uneven"])
def test_two_ranks_train_what_lightning_does_on_one_process(
    case: str, played: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    stock, ours, _ = played
    one, two = (torch.tensor(result[case]["weights"]) for result in (stock, ours))
    assert torch.allclose(one, two, rtol=0, atol=1e-6), (one - two).abs().max()
    assert ours[case]["val"] == pytest.approx(stock[case]["val"], rel=1e-5)


def test_a_checkpoint_is_one_file_and_another_number_of_devices_is_refused(
    played: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    _, ours, _ = played
    assert ours["saved"] == ["model.ckpt"]
    assert "wants 1 processes, and there are 2 ranks; pass devices=2" in ours["refusal"]


def test_the_fits_are_recorded(played: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    rows = read_run(played[2]).timelines[0].steps
    assert len(rows) == 6 + 4 + 6 + 6 + 6
    rows, manual = rows[:16], rows[16:]
    assert [len(row.exchanges) for row in rows] == [1] * 16
    # The first optimizer's step ends a row, so the second's exchange is in the next one.
    assert [len(row.exchanges) for row in manual] == [1] + [2] * 11
    passes = [[phase.name for phase in row.phases].count("backward") for row in manual]
    assert passes == [1] + [2] * 11
    phases = [phase.name for row in rows for phase in row.phases]
    assert {"forward", "loss", "backward", "optimizer", "evaluation"} <= set(phases)
    assert phases.count("forward") == 6 + 6 + 6
    assert all(row.loss is not None for row in rows[1:6])
    unwatched = {phase.name for row in rows[6:10] for phase in row.phases}  # without the callback
    assert {"data", "forward", "backward", "optimizer"} <= unwatched


STOCK = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
    def training_step(self, batch, number):
        return (self.layer(batch[0]) - batch[1]).square().mean()
    def validation_step(self, batch, number):
        pass
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

loader = DataLoader(TensorDataset(torch.randn(80, 6), torch.randn(80, 1)), batch_size=4)
Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Module(), loader, loader)
"""


def test_a_stock_fit_by_ddp_is_recorded_unasked(tmp_path: Path) -> None:
    """The wrapper is left in evaluation mode by the check of the validation loop."""
    (tmp_path / "train.py").write_text(STOCK)
    done = warm.run(tmp_path, "run", "-np", "2", "--run-dir", "run", "--", "python", "train.py", timeout=100)
    assert done.returncode == 0, done.stderr
    timeline = read_run(tmp_path / "run").timelines[0]
    assert (timeline.setup[SETUP_LOOP], timeline.setup[SETUP_WRAPPER]) == (LIGHTNING, DDP)
    assert len(timeline.steps) >= 8, "of 10"
    assert all(len(row.exchanges) == 1 for row in timeline.steps)

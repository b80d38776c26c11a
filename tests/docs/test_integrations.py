"""Every Python block of docs/start.md runs, with the real packages, on two ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
PART = PAGE.partition("\n## Trainers of other packages\n")[2].partition("\n## ")[0]
SECTIONS = {
    found.group(1): re.findall(r"```python\n(.*?)```", found.group(2), re.DOTALL)
    for found in re.finditer(r"^### (\S+)\n(.*?)(?=^##|\Z)", PART, re.DOTALL | re.MULTILINE)
}

# What the page supposes to be there, and what is looked at afterwards.
BEFORE = """
import os, sys, types, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd
warnings.filterwarnings("ignore")
torch.manual_seed(0)
x, y = torch.randn(24, 4), torch.randn(24, 1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return Output(loss=nn.functional.mse_loss(self.layer(x), labels))

class Output(dict):
    __getattr__ = dict.__getitem__

model, data = Model(), [{"x": a, "labels": b} for a, b in zip(x, y)]
"""
TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
theirs = sys.modules["their_package"] = types.ModuleType("their_package")
theirs.TheirTrainer = type("TheirTrainer", (Trainer,), {})
"""
SENTENCES = f"""
from pathlib import Path
sys.path.append({str(ROOT)!r})
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tests.ranks.sentence_script import make_bert, model as make_model, pairs
bert = Path("bert")
if fd.init().rank == 0:  # transformers writes on no other
    make_bert(bert)
fd.mean(0.0)
model = make_model(bert)
loss = MultipleNegativesRankingLoss(model)
arguments = SentenceTransformerTrainingArguments("out", use_cpu=True, report_to=[], save_strategy="no")
"""
LIGHTNING = """
from lightning.pytorch import LightningModule as Base, Trainer
data = TensorDataset(x, y)

class LightningModule(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
ACCELERATE = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
loader = DataLoader(data, batch_size=4)
"""
NOTEBOOK = """
loader = DataLoader(TensorDataset(x, y), batch_size=4)

def build():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)
"""
TRAINED = "assert trainer.state.global_step > 0\n"
SCRIPTS = {
    "transformers": (
        TRANSFORMERS,
        [
            TRAINED,
            "Mine(model=model, args=arguments, train_dataset=data).train()\n",
            "trainer.train()\n" + TRAINED,
        ],
    ),
    "sentence-transformers": (
        SENTENCES,
        ["Mine(model=model, args=arguments, train_dataset=pairs(24), loss=loss).train()\n"],
    ),
    "Lightning": (
        LIGHTNING,
        [
            "assert type(trainer.strategy).__name__ == 'DDPStrategy'\n",
            "trainer.fit_loop.max_epochs = 2\ntrainer.fit(Mine())\n",
        ],
    ),
    "Accelerate": (ACCELERATE, ["assert fd.world().session.steps.done > 0\n"]),
    "Notebooks": (NOTEBOOK, ["assert len(losses) == 2 and losses[0] == losses[0]\n"]),
}


def test_all_blocks_of_the_page_are_known() -> None:
    assert {name: len(blocks) for name, blocks in SECTIONS.items()} == {
        name: len(checks) for name, (_, checks) in SCRIPTS.items()
    }


@pytest.mark.full("slow")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("section", SCRIPTS)
def test_the_blocks_run(section: str, tmp_path: Path) -> None:
    package = {"Notebooks": "cloudpickle"}.get(section, section.lower().replace("-", "_"))
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing")
    before, checks = SCRIPTS[section]
    pieces = [BEFORE, before]
    for block, check in zip(SECTIONS[section], checks, strict=True):
        pieces += [block, check]
    if section != "Notebooks":
        pieces.append('print("rank", fd.world().rank, "of", fd.world().size, "is done")\n')
    (tmp_path / "script.py").write_text("\n".join(pieces))
    launcher = ["-m", "farandole", "run", "-np", "2", "--"] if section != "Notebooks" else []
    words = [sys.executable, *launcher, *([sys.executable] if launcher else []), "script.py"]
    done = subprocess.run(
        words, cwd=tmp_path, text=True, capture_output=True, timeout=180, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if launcher:
        assert {line.split()[-5] for line in done.stdout.splitlines() if line.endswith("is done")} == {"0", "1"}

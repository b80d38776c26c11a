"""Every Python block of docs/start.md runs on two ranks, and does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
PART = PAGE.partition("\n## Loops of other shapes\n")[2]
BLOCKS = dict(re.findall(r"^### ([^\n]+)\n(?:(?!^### ).)*?```python\n(.*?)```", PART, re.DOTALL | re.MULTILINE))

# What the blocks suppose to be there, and what is looked at afterwards.
BEFORE = {
    "No loader": """
tokens, length, batch_size, steps = torch.arange(400) % 7, 8, 4, 12
model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7))
loss_function = lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
""",
    "Reinforcement learning": """
def make_environment(seed):
    return torch.Generator().manual_seed(seed)

def collect(agent, environment):
    states = torch.randn(32, 4, generator=environment)
    with torch.no_grad():
        log_probs = agent(states).log_softmax(1)
    actions = log_probs.exp().multinomial(1)[:, 0]
    return states, actions, log_probs.gather(1, actions[:, None])[:, 0], states[:, 0] * (2 * actions - 1)

agent, updates, epochs, target_kl = nn.Linear(4, 2), 4, 20, 0.003
model, lr = agent, 0.1
""",
    "LoRA": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.output = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, inputs):
        return self.output(self.attention(inputs))

model, loss_function = nn.Sequential(Block()), F.mse_loss
loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 2)), batch_size=4)
""",
    "Contrastive losses": """
model, temperature, lr = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.1, 0.1
views = torch.randn(27, 8)
loader = DataLoader(TensorDataset(views, views + 0.1 * torch.randn(27, 8)), batch_size=8 // SIZE)
""",
}
AFTER = {
    "No loader": """
assert fd.mean(loss) < 1.8, "less than a guess among 7"
drawn = fd.gather([inputs.tolist()])
assert len({str(each) for each in drawn}) == SIZE, "each rank has samples of its own"
""",
    "Reinforcement learning": """
assert epoch < epochs - 1, "the limit was reached"
assert fd.gather([epoch]) == [epoch] * SIZE
""",
    "LoRA": """
assert len(adapters) == 2 and bool(adapters[1].any()), "they have learned"
""",
    "Contrastive losses": """
fd.print("sum", sum(p.double().abs().sum().item() for p in model.parameters()))
""",
}
SCRIPT = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd
SIZE = int(os.environ.get("WORLD_SIZE", "1"))
lr = 0.05
"""


def script() -> str:
    pieces = [SCRIPT]
    for heading, code in BLOCKS.items():
        pieces += [
            "torch.manual_seed(0)\n",
            BEFORE[heading],
            "optimizer = torch.optim.SGD(model.parameters(), lr)\n",
            code,
            "result = fd.verify(model, optimizer)\nassert result, result\n",
            AFTER[heading],
            "fd.shutdown()\n",
        ]
    return "".join(pieces)


def run(folder: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script())
    words = [sys.executable, "-m", "farandole", "run", "-np", str(ranks), "--", sys.executable, "script.py"]
    done = subprocess.run(
        words, cwd=folder, text=True, capture_output=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_all_blocks_of_the_page_are_known() -> None:
    assert list(BLOCKS) == list(BEFORE) == list(AFTER)
    assert PART.count("```python") == len(BLOCKS)


@pytest.mark.full("slow")
@pytest.mark.timeout(250)
def test_the_blocks_run_and_warn_of_nothing_and_the_contrastive_loss_is_that_of_one_process(
    tmp_path: Path,
) -> None:
    one, two = run(tmp_path, 1), run(tmp_path, 2)
    assert "warning" not in two.stdout + two.stderr, two.stdout + two.stderr
    sums = [float(re.search(r"sum ([\d.]+)", each.stdout)[1]) for each in (one, two)]  # type: ignore[index]
    assert sums[0] == pytest.approx(sums[1], abs=1e-5)

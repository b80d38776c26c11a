"""Trainings of divided models and of tables as other people write them, each with one fault: see `strangers.py`.

The fault is a line of the script, or the command: its plan, its link. Samples of a step follow from the plan too,
so `verdict_strangers.py` compares steps for the same samples.
"""

from __future__ import annotations

from strangers import TABULAR, Stranger

STAGES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd

torch.manual_seed(0)
rank = fd.init().rank

class Block(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

model = nn.Sequential(*(Block() for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
model, optimizer = fd.distribute(model, optimizer)
data = TensorDataset(torch.randn(8192, 512), torch.randn(8192, 512))
loader = fd.shard(DataLoader(data, batch_size={batch}, shuffle=True))
step = 0
while step < {steps}:
    for x, y in loader:
        optimizer.zero_grad()
        loss = fd.step(model, nn.functional.mse_loss, x, y)
        optimizer.step()
        step += 1
        if step >= {steps}:
            break
print("loss", float(loss))
"""

TOKENS = """
import os
import torch
from torch import nn
from torch.nn import functional as F
import farandole as fd

fd.init()
torch.manual_seed(0)
length, width, heads = 256, 128, 4
text = open(os.path.join(os.path.dirname(os.__file__), "argparse.py"), "rb").read()
rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, length + 1, 64)
data = torch.utils.data.TensorDataset(rows[:, :-1], rows[:, 1:])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        {mlp}
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, heads, C // heads).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(length, width)
        self.h, self.lm_head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(width, 256)
    def forward(self, x):
        h = self.wte(x) + self.wpe(fd.context_positions(x.shape[1]))
        for block in self.h:
            h = block(h)
        return self.lm_head(h)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fd.distribute(model, optimizer)
loader = fd.shard(torch.utils.data.DataLoader(data, batch_size={batch}, shuffle=True, drop_last=True))
step = 0
while step < {steps}:
    for x, y in loader:
        x, y = fd.context_shard(x, y)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        step += 1
        if step >= {steps}:
            break
print("loss", loss.item())
"""

CLICKS = """
import torch
from torch import nn
import farandole as fd

fd.init()
torch.manual_seed(0)
users, items = (fd.RowTable(f"clicks.{name}", dim=32{table}) for name in ("users", "items"))
head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(head.parameters(), 0.1)
head, optimizer = fd.distribute(head, optimizer)
users.attach(optimizer)
items.attach(optimizer)
for step in range({steps}):
    user, item = torch.randint(0, 200_000, (1024,)), torch.randint(0, 5_000, (1024,))
    clicked = (torch.rand(1024) < 0.1).float()
    scores = head(torch.cat([users(user), items(item)], 1)).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
"""

_DENSE = "self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))"
_EXPERTS = "self.mlp = fd.MixtureOfExperts(width, 256, num_experts=4, top_k=2)"


def _on(rate: str, plan: str) -> str:
    return f"emulate --hosts 2 --rate {rate} {plan}"


def _slow(
    name: str, script: str, kinds: tuple[str, ...], plan: str, rate: str = "100mbit", **more: str
) -> Stranger:
    """Return a case whose fault is its link."""
    return Stranger(name, script, kinds, more, more, _on(rate, plan), _on("10gbit", plan), steps=25)


DIVIDED = (
    Stranger("tensor 2, nothing wrong", TABULAR, (), {"batch": "512"}, command="run -np 2 --set tensor=2"),
    Stranger("tensor 2, a slow disk", TABULAR, ("input",), {"read": "time.sleep(0.0005)"},
             command="run -np 2 --set tensor=2"),
    _slow("tensor 2 at 100 Mbit/s, large batches", TABULAR, ("tensor-communication",), "--set tensor=2",
          batch="512"),
    _slow("tensor 2 at 100 Mbit/s, small batches", TABULAR, ("tensor-communication",), "--set tensor=2"),
    Stranger("pipeline 2, cut after the first block", STAGES, ("slow-stage",), {"batch": "256"}, {"batch": "256"},
             command="run -np 2 --set pipeline=2 --set micro_batches=8 --set 'pipeline_cuts=[\"1\"]'",
             healthy_command="run -np 2 --set pipeline=2 --set micro_batches=8"),
    Stranger("pipeline 2, two micro-batches", STAGES, ("bubble",), {"batch": "1024"}, None, steps=40,
             command="run -np 2 --set pipeline=2 --set micro_batches=2"),
    _slow("context 2 at 100 Mbit/s", TOKENS, ("context-communication", "communication"), "--set context=2",
          mlp=_DENSE, batch="4"),
    _slow("experts on 2 ranks at 100 Mbit/s", TOKENS, ("expert-communication", "communication"),
          "--set expert=2", mlp=_EXPERTS, batch="4"),
    _slow("zero 3 at 100 Mbit/s", TABULAR, ("communication",), "--set zero=3"),
    _slow("zero 2 at 100 Mbit/s", TABULAR, ("communication", "shard-communication"), "--set zero=2"),
    _slow("tables in step at 50 Mbit/s", CLICKS, ("rows-communication",), "", "50mbit", table=", staleness=0"),
    Stranger("tensor 2 x data 2, rank 3 is late", TABULAR, ("straggler",), ranks=(3,), steps=40,
             places={"first": "if rank == 3: time.sleep(0.2)"}, command="run -np 4 --set tensor=2"),
    Stranger("ranks that meet every 10 steps", TABULAR, (), {"batch": "512", "optimizer": ", fused=True"},
             command="run -np 2 --set sync=local:H=10"),
)  # fmt: skip

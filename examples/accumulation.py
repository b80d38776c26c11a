"""Gradient accumulation: four backward passes per step, one exchange.

    farandole run -np 2 -- python accumulation.py
    farandole run -np 2 --set accumulate=4 -- python accumulation.py --plan-from-command

The passes in between send nothing. The last group of an epoch may be shorter; its step exchanges
the gradients accumulated so far.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd

parser = argparse.ArgumentParser()
parser.add_argument("--plan-from-command", action="store_true", help="take the plan of farandole run")
arguments = parser.parse_args()

world = fd.init()
torch.manual_seed(0)
x = torch.randn(1000, 20)
y = (x[:, :1] * x[:, 1:2]).sign()

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
plan = None if arguments.plan_from_command else fd.Plan(accumulate=4, clip_norm=1.0)
model, optimizer = fd.distribute(model, optimizer, plan)
loader = fd.shard(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))

for epoch in range(3):
    for i, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / 4).backward()
        if (i + 1) % 4 == 0 or i + 1 == len(loader):
            fd.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    mean_loss = fd.mean(loss.item())
    if world.rank == 0:
        print(f"epoch {epoch}: loss {mean_loss:.4f}")

"""Save while training, and go on after a crash, on any number of ranks.

::

    farandole run -np 2 -- python checkpoints.py --die-at 25     # ends like a machine without power
    farandole run -np 3 -- python checkpoints.py                 # goes on from step 20, on three ranks
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd

parser = argparse.ArgumentParser()
parser.add_argument("--directory", default="checkpoints")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--die-at", type=int)
options = parser.parse_args()

fd.init()
fd.seed(1, per_rank=True)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(960, 20, generator=generator)
targets = inputs[:, :5].tanh() @ torch.randn(5, 1, generator=generator)

model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
model, optimizer = fd.distribute(model, optimizer)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
loader = fd.shard(DataLoader(TensorDataset(inputs, targets), batch_size=24, shuffle=True), split=True)

checkpointer = fd.Checkpointer(
    options.directory, model, optimizer, every_steps=10, keep=2, scheduler=scheduler, loader=loader
)
step = checkpointer.load() or 0
fd.print(f"begin at step {step} on {fd.world().size} ranks")

is_preempted = False
while step < options.steps and not is_preempted:
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        is_preempted = checkpointer.after_step(step)
        if step == options.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == options.steps or is_preempted:
            break
checkpointer.close()
fd.print(f"loss {fd.mean(loss.item(), len(x)):.4f} after {step} steps")

"""A byte-level language model on the text of Python's standard library: nothing to download.

farandole run -np 2 -- python language_model.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import farandole as fd
from farandole.bench.data import load_text
from farandole.bench.models import LanguageModel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step")
parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
arguments = parser.parse_args()

world = fd.init()
torch.manual_seed(0)
model = LanguageModel(width=64, depth=2, heads=4, context=arguments.context)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = fd.distribute(model, optimizer)
training, _ = load_text(context=arguments.context)
loader = fd.shard(DataLoader(training, batch_size=arguments.batch_size, shuffle=True))

for step, (inputs, targets) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    fd.log(loss=loss, tokens=targets.numel(), total_steps=arguments.steps)
    optimizer.step()
    if step + 1 >= arguments.steps:
        break

mean_loss = fd.mean(loss.item())
if world.rank == 0:
    print(f"loss {mean_loss:.3f} after {arguments.steps} steps")

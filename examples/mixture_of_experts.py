"""A byte-level language model with mixtures of experts, on the text of Python's standard library.

farandole run -np 2 --set expert=2 -- python mixture_of_experts.py

Each rank has half of the experts of each block, and reads text of its own. Without ``--set expert=2`` each rank
has all of them, and the losses are the same.
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
parser.add_argument("--experts", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step")
parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
arguments = parser.parse_args()

world = fd.init()
torch.manual_seed(0)
model = LanguageModel(width=64, depth=2, heads=4, context=arguments.context)
for block in model.blocks:
    block.mlp = fd.MixtureOfExperts(64, 128, num_experts=arguments.experts, top_k=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = fd.distribute(model, optimizer)
training, _ = load_text(context=arguments.context)
loader = fd.shard(DataLoader(training, batch_size=arguments.batch_size, shuffle=True))

for step, (inputs, targets) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    (loss + fd.router_loss(model, balance=0.01, z=0.001)).backward()
    fd.log(loss=loss, tokens=targets.numel(), total_steps=arguments.steps)
    optimizer.step()
    if step + 1 >= arguments.steps:
        break

mean_loss = fd.mean(loss.item())
if world.rank == 0:
    experts = model.blocks[0].mlp.experts
    print(f"{experts.up.shape[0]} of {arguments.experts} experts on rank 0")
    print(f"loss {mean_loss:.4f} after {arguments.steps} steps")

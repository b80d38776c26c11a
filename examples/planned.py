r"""A language model whose plan is found before it trains, on the text of Python's standard library.

    farandole plan planned.py:make_model --batch planned.py:make_batch --loss planned.py:loss \
        --cluster 4xrtx-4090+25gbe --gpus 2 --global-batch 16 --fix accumulate=1 --out plan.toml
    farandole run -np 2 --plan plan.toml -- python planned.py --global-batch 16

The functions that the planner calls are those that train. `fd.step` runs every plan, pipelines too.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import farandole as fd
from farandole.bench.data import load_text
from farandole.bench.models import LanguageModel

CONTEXT = 64


def make_model() -> nn.Module:
    return LanguageModel(width=64, depth=4, heads=4, context=CONTEXT)


def make_batch(samples: int = 8) -> torch.Tensor:
    return torch.zeros(samples, CONTEXT, dtype=torch.int64)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=64, help="sequences of a step, over all ranks")
    arguments = parser.parse_args()
    world = fd.init()
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fd.distribute(model, optimizer)
    training, _ = load_text(context=CONTEXT)
    samples = arguments.global_batch // world.sample_size
    loader = fd.shard(DataLoader(training, batch_size=samples, shuffle=True, drop_last=True))
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        mean = fd.step(model, loss, inputs, targets)
        optimizer.step()
        if step + 1 >= arguments.steps:
            break
    if world.rank == 0:
        print(f"loss {float(mean):.3f} after {step + 1} steps")


if __name__ == "__main__":
    main()

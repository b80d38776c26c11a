"""The demo's training script, written as a user would write it.

    python -m farandole.bench.demo_train --steps 100
    farandole run -np 2 -- python -m farandole.bench.demo_train --steps 100

The batch is the whole job's (`split=True`), so that any number of ranks trains on the same samples in
the same steps and the curves can be laid over each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import farandole as fd

from .data import load_idx_images, load_text
from .models import LanguageModel, SmallCNN

CONTEXT = 128


def build(dataset: str, directory: Path | None) -> tuple[nn.Module, Dataset[Any], Dataset[Any]]:
    """Return the model, the training data and the validation data of a demo data set."""
    if dataset == "text":
        training, validation = load_text(context=CONTEXT)
        return LanguageModel(width=128, depth=4, heads=4, context=CONTEXT), training, validation
    if directory is None:
        raise fd.ConfigError(f"data set {dataset} needs the directory of its files")
    return SmallCNN(), load_idx_images(directory, train=True), load_idx_images(directory, train=False)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy: over bytes for text, over images otherwise."""
    output = model(inputs)
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def main() -> None:
    """Train, validate, and say how it went on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", choices=["text", "fashion-mnist"], default="text")
    parser.add_argument("--data", type=Path, help="directory of the data set's files")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="of the whole job")
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()

    world = fd.init()
    torch.manual_seed(0)
    model, training, validation = build(arguments.dataset, arguments.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(DataLoader(training, batch_size=arguments.batch_size, shuffle=True), split=True, seed=0)

    step = 0
    while step < arguments.steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            tokens = targets.numel() if arguments.dataset == "text" else None
            fd.log(loss=loss, tokens=tokens, total_steps=arguments.steps)
            optimizer.step()
            step += 1
            if step >= arguments.steps:
                break

    model.eval()
    total, count = 0.0, 0
    few = Subset(validation, range(min(512, len(validation))))  # type: ignore[arg-type]
    with torch.no_grad():
        for inputs, targets in fd.shard(DataLoader(few, batch_size=32), evaluate=True):
            total += float(loss_of(model, inputs, targets)) * len(inputs)
            count += len(inputs)
    validation_loss = fd.mean(total / max(count, 1), count)
    if world.rank == 0:
        sys.stdout.write(json.dumps({"steps": step, "validation_loss": round(validation_loss, 5)}) + "\n")


if __name__ == "__main__":
    main()

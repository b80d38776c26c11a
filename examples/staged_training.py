"""Lower layers first: what trains when is in the plan, and the loop does not know of it.

    farandole run -np 2 -- python examples/staged_training.py
    farandole run -np 2 -- python examples/staged_training.py --resume   # goes on from the checkpoint

The first 20 steps train the first layer and the head, the next 20 both layers, and the rest all but the first.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import farandole as fd

STEPS = 60
PLAN = fd.Plan(
    train_schedule={"0": "layers.0.* head.*", "20": "layers.[01].* head.*", "40": "layers.[12].* head.*"}
)


class Model(nn.Module):
    """Three layers with a residual connection each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, ``[batch, 4]``."""
        for layer in self.layers:
            x = x + layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, default=Path("staged-checkpoints"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()

    fd.init()
    fd.seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = fd.distribute(model, optimizer, PLAN)
    begin = fd.load(arguments.checkpoints, model, optimizer) if arguments.resume else 0

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    targets = x[:, :4].abs().argmax(1)
    rows = slice(fd.world().rank, None, fd.world().size)
    before = ""
    for step in range(begin, arguments.steps):
        trains = ", ".join(sorted({name.rpartition(".")[0] for name, each in model.named_parameters()
                                   if each.requires_grad}))  # fmt: skip
        if trains != before:
            fd.print(f"from step {step}: {trains}")
            before = trains
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), targets[rows])
        loss.backward()
        optimizer.step()
    fd.save(arguments.checkpoints, model, optimizer, step=arguments.steps)
    fd.print(f"loss after {arguments.steps} steps: {fd.mean(loss.item()):.4f}")


if __name__ == "__main__":
    main()

"""The ranks of planner.py: train a real model, or one that sleeps instead of computing, by the command's plan.

farandole run -np 2 --plan plan.toml -- python benchmarks/planner_ranks.py language --batch 32
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farandole as fd
from farandole.bench.models import TransformerBlock
from farandole.core.host.process_status import data_bytes
from farandole.core.vocabulary.degrees import OTHER_SAMPLES
from farandole.parallel.model import DistributedModel
from models import Sleep, SleepForWeights, mean_square
from shared import make_parser

TOKENS, WIDTH, DEPTH, HEADS, VOCABULARY = 64, 192, 4, 6, 256
VIRTUAL_WIDTH, VIRTUAL_BLOCKS = 512, 8
SECONDS = 0.002
"""What a virtual block sleeps for a sample in forward, for its input in backward, and for its weights."""
THREADS_BYTES = 64 * 2**20
"""Stacks of threads that start later, and what libraries allocate once."""


class Language(nn.Module):
    """Predicts the next byte, without positions: ranks of a context group have other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH, HEADS) for _ in range(DEPTH))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take bytes (batch, length), return logits (batch, length, vocabulary)."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output(x)
        return logits


class VirtualBlock(nn.Module):
    """A layer with a gradient to exchange, which sleeps as long as a larger one computes.

    Backward is twice forward: half of it for its input, half for its weights, as of a linear layer.
    """

    speed = 1.0
    """Of this rank's sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(VIRTUAL_WIDTH, VIRTUAL_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        seconds = SECONDS * x.shape[0] / self.speed
        weight = SleepForWeights.apply(self.linear.weight, seconds)
        y: torch.Tensor = Sleep.apply(nn.functional.linear(x, weight, self.linear.bias), seconds)
        return y


def language_batch(samples: int = 4) -> torch.Tensor:
    """Return tokens."""
    return torch.zeros(samples, TOKENS, dtype=torch.int64)


def virtual_model() -> nn.Module:
    """Return the model that sleeps."""
    return nn.Sequential(*[VirtualBlock() for _ in range(VIRTUAL_BLOCKS)])


def virtual_batch(samples: int = 4) -> torch.Tensor:
    """Return an input that needs a gradient: all blocks are alike."""
    return torch.ones(samples, VIRTUAL_WIDTH, dtype=torch.float32).requires_grad_()


def language_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "language": (Language, language_batch, language_loss),
    "virtual": (virtual_model, virtual_batch, mean_square),
}
"""By name: the model, a batch of so many samples, and the loss of output and targets."""


def main() -> None:
    """Train."""
    parser = make_parser(
        __doc__,
        steps=30,
        slow=(str, "RANK:SPEED of a rank whose sleep takes longer"),
        memory=(int, "bytes that a rank may allocate beside libraries"),
    )
    parser.add_argument("--batch", type=int, required=True, help="samples of a step over all ranks")
    parser.add_argument("model", choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    here = fd.init()
    if options.slow:
        rank, speed = options.slow.split(":")
        VirtualBlock.speed = float(speed) if here.rank == int(rank) else 1.0
    make_model, make_batch, loss_of = MODELS[options.model]
    if options.memory:
        _warm_up()
        limit = (data_bytes() or 0) + options.memory + THREADS_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    fd.distribute(model, optimizer)
    plan, mesh = DistributedModel.of(model).plan, DistributedModel.of(model).mesh
    assert plan is not None, "it is distributed"
    assert mesh is not None, "it is distributed"
    samples = options.batch // mesh.size(*OTHER_SAMPLES) // plan.accumulate
    for _ in range(options.steps):
        for _ in range(plan.accumulate):
            _pass(model, make_batch(samples), loss_of, plan, is_language=options.model == "language")
        optimizer.step()
        optimizer.zero_grad()


def _pass(model: Any, batch: torch.Tensor, loss_of: Any, plan: fd.Plan, *, is_language: bool) -> None:
    targets = batch if is_language else batch.detach()
    if plan.context != 1:
        batch, targets = fd.context_shard(batch, targets)
    if plan.pipeline != 1 or plan.micro_batches > 1:
        fd.step(model, loss_of, batch, targets)
        return
    (loss_of(model(batch), targets) / plan.accumulate).backward()


def _warm_up() -> None:
    """Let libraries and the threads of the session allocate what they keep, beside any model."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    fd.distribute(model, optimizer)
    plan = DistributedModel.of(model).plan
    assert plan is not None, "it is distributed"
    for _ in range(plan.accumulate):
        model(torch.full((4, 64), float(fd.world().rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()

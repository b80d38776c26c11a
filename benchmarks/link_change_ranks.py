"""One rank of `link_change`: trains one contender until a moment, and notes when each step began and ended."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import farandole as fd
from farandole.bench.models.language import VOCABULARY, LanguageModel
from farandole.bench.step.contenders import make_contender

CONTEXT = 64
ASK_EVERY = 4
"""Steps between two looks at rank 0's clock: all ranks end after the same step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds of time.monotonic")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    world = fd.init(device="cpu")
    generator = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, VOCABULARY, (arguments.batch, CONTEXT + 1), generator=generator)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    contender = make_contender(
        arguments.contender,
        partial(LanguageModel, arguments.width, arguments.depth, 4, CONTEXT),
        loss_of,
        partial(torch.optim.SGD, lr=0.05),
    )
    begins: list[float] = []
    seconds: list[float] = []
    goes_on = torch.ones(1)
    while bool(goes_on):
        for _ in range(ASK_EVERY):
            begins.append(time.monotonic())
            contender.step()
            seconds.append(time.monotonic() - begins[-1])
        goes_on[0] = float(time.monotonic() < arguments.until)
        dist.broadcast(goes_on, 0)
    del contender
    if world.rank == 0:
        Path(arguments.output).write_text(json.dumps({"begins": begins, "seconds": seconds}))


if __name__ == "__main__":
    main()

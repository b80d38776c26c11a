"""One rank of `link_change`: trains one contender until a moment, and notes when each step began and ended."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist

import farandole as fd
from farandole.bench.models import LanguageModel
from farandole.bench.step_worker import make_contender
from models import next_byte_loss, random_bytes
from shared import worker_parser, write_found

CONTEXT = 64
ASK_EVERY = 4
"""Steps between two looks at rank 0's clock: all ranks end after the same step."""


def main() -> None:
    arguments = worker_parser(
        __doc__, contender=str, until=(float, "seconds of time.monotonic"), width=int, depth=int, batch=int
    ).parse_args()
    world = fd.init(device="cpu")
    contender = make_contender(
        arguments.contender,
        partial(LanguageModel, arguments.width, arguments.depth, 4, CONTEXT),
        next_byte_loss(random_bytes(arguments.batch, CONTEXT, world.rank)),
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
    write_found({"begins": begins, "seconds": seconds}, arguments)


if __name__ == "__main__":
    main()

"""How many files an int8 gradient crosses: from its autograd hook until its mean is in ``parameter.grad``.

Counted on the training thread and the communication thread of one rank, in a step without special cases. Not
counted: recording (here there is no recorder), the checks before the optimizer's step, which leave gradients
alone, and results that are kept from earlier steps. The limit may only be lowered.

The files, and why each is crossed:

- ``passes``: which gradients are there; ``in_flight``: which buckets may start, in one order on all ranks.
- ``coded_bucket``: what a bucket announces beside what its codec sends, and what is done about NaN.
- ``grad_ownership``: the bucket's flat memory, and who may write ``parameter.grad``: the same without a codec.
- ``units``: what the codec is given of a flat tensor, and keeps for it; named operations and sessions do the same.
- ``quantize``: the rounds of the codec, with the loops that pack and add up.
- ``message``: what a round is, for the transport and the simulator.
- ``comm_thread``: the order of rounds; ``transport``: frames between ranks; ``connection``: the bytes of a socket.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import farandole as fd
from farandole.comm.engine import passes
from farandole.core.vocabulary.events import NullRecorder
from tests.ranks.pool import ranks

LIMIT = 10
SOURCE = str(Path(fd.__file__).parent)


class Walk:
    """A profile function that notes which files of the package are entered, from the first hook on."""

    def __init__(self) -> None:
        self.is_open = False
        self.files: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        is_on_the_way = self.is_open and bool(self.files or file == passes.__file__)
        if event == "call" and is_on_the_way and file.startswith(SOURCE):
            self.files.setdefault(file[len(SOURCE) + 1 :], set()).add(frame.f_code.co_name)


@ranks(2)
def test_files_from_the_hook_to_the_mean() -> None:
    world = fd.init()
    walk = Walk()
    threading.setprofile(walk)  # for the communication thread, which is started with the reducer
    try:
        torch.manual_seed(0)
        model = nn.Linear(128, 128, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(codec="int8", route="flat"))
        before, world.session.recorder = world.session.recorder, NullRecorder()
        sys.setprofile(walk)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 128) + world.rank).square().mean()
            walk.is_open = step == 3
            loss.backward()
            walk.is_open = False
            optimizer.step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    world.session.recorder = before
    files = {file: names for file, names in walk.files.items() if not file.endswith("vocabulary/events.py")}
    listed = "\n".join(f"{file}: {', '.join(sorted(names))}" for file, names in files.items())
    print(f"{len(files)} files\n{listed}")
    assert {"comm/engine/passes.py", "comm/transport/transport.py"} <= files.keys(), listed
    assert len(files) <= LIMIT, f"{len(files)} files:\n{listed}"

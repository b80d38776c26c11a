"""A rank that trains with shards; rank 1 is killed before a backward pass, or before its step: `argv[1]`."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import PeerLost


def main() -> None:
    """Train until rank 1 is gone."""
    dies_before, route = sys.argv[1:]
    here = fd.init(timeout_seconds=30)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    fd.distribute(model, optimizer, fd.Plan(zero=1, route=route, timeout_seconds=30))  # type: ignore[arg-type]
    for step in range(4):
        optimizer.zero_grad()
        is_last = here.rank == 1 and step == 2
        if is_last and dies_before == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(2, 64)).sum().backward()
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        except PeerLost as problem:
            held = optimizer.param_groups[0]["params"]
            same = all(one is other for one, other in zip(held, model.parameters(), strict=True))
            print(f"step {step}: {problem}; the groups hold the parameters: {same}", flush=True)
            return


if __name__ == "__main__":
    main()

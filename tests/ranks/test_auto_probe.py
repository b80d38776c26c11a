"""The tuner's real probe, right after exchanges that end with bytes unsent: one thread uses the connections."""

from __future__ import annotations

import socket

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import assert_same_bits

pytestmark = pytest.mark.full("further")

STEPS = 16
SEND_BYTES = 32 * 1024
"""So little that the kernel takes the last message of an exchange only bit by bit."""


@takes(90.0)
@ranks(3)
def test_links_are_measured_while_the_last_exchange_is_still_being_sent() -> None:
    world = fd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    fd.distribute(model, optimizer, fd.Plan(codec="auto", route="flat", timeout_seconds=20, bucket_bytes=1 << 19))
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    tuner, lines = reducer.tuner, reducer.open_route.route
    assert tuner is not None
    assert lines is not None
    assert lines.conductor is not None
    for lane in lines.conductor._transport._lanes.values():  # type: ignore[union-attr]
        lane.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(world.rank))
    looks = 0
    for step in range(STEPS):
        before = len(tuner._steps.measured_seconds)
        tuner.pause.next_seconds = (
            0.0 if world.rank == step % 3 else float("inf")
        )  # another rank wishes it each time
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        looks += len(tuner._steps.measured_seconds) <= before
    assert looks > STEPS // 2, "the link was measured again and again"
    assert_same_bits(model)

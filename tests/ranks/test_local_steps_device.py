"""Local steps of a model on a simulated accelerator: another thread's operations are in order with the steps.

Changes travel exactly here: codecs take them in CPU memory, which this accelerator is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.device.streams import simulate_device
from tests.ranks.pool import ranks
from tests.ranks.reference import data, own
from tests.simulated_device import COPIES, Race, SimulatedDevice

WIDTH = 64
OVERLAPPED = "diloco:H=6,fragments=3,overlap=2"
_CPU = torch.device("cpu")


class _AnotherStream:
    """In place of the thread of meetings: what it tells the device goes to a stream of its own."""

    device: SimulatedDevice

    def __init__(self, workers: int, name: str) -> None:
        assert workers == 1

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        with self.device.on(COPIES):
            done.set_result(work())
        return done

    def shutdown(self, *, wait: bool) -> None:
        assert wait


@contextmanager
def simulated(patch: pytest.MonkeyPatch, *left_out: str) -> Generator[SimulatedDevice, None, None]:
    device = SimulatedDevice(left_out)
    simulate_device(_CPU, device)
    with patch.context() as inside:
        inside.setattr("farandole.sync.meetings.ThreadPoolExecutor", _AnotherStream)
        inside.setattr(_AnotherStream, "device", device, raising=False)
        try:
            with device:
                yield device
        finally:
            device.left_out = frozenset()
            simulate_device(_CPU, None)


def train(sync: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    fd.distribute(model, optimizer, fd.Plan(sync=sync))
    for step in range(13):
        x, y = data(8, seed=step, width=WIDTH)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
    fd.drain(model)
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("sync", ["diloco:H=3", OVERLAPPED])
@ranks(2)
def test_the_bits_of_the_cpu_and_no_race(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fd.init()
    expected = train(sync)
    with simulated(monkeypatch):
        found = train(sync)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("left_out", ["end", "read", "keep"])
@ranks(2)
def test_a_wait_that_is_left_out_is_found(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fd.init()
    with simulated(monkeypatch, left_out), pytest.raises(Race):
        train(OVERLAPPED)

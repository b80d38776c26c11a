"""The engine with gradients on a simulated accelerator: the bits of the CPU, and waits left out are found."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.buckets.device_coded_bucket import DeviceCodedBucket
from farandole.comm.device.streams import simulate_device
from farandole.parallel.apply import reducer_of
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, data, own
from tests.simulated_device import OUTSIDE, Race, SimulatedDevice

WIDTH = 64
CODECS = ["bf16", "fp16", "int8", "int4", "sign", "int8:feedback=false"]
_CPU = torch.device("cpu")


class Net(nn.Module):
    """Two matrices that are large enough for a codec, and a branch that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.branch, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, *, branch: bool) -> torch.Tensor:
        """Take (batch, WIDTH), return (batch, 3)."""
        y = self.second(torch.tanh(self.first(x)))
        out: torch.Tensor = self.last(torch.tanh(y + self.branch(y)) if branch else torch.tanh(y))
        return out


@contextmanager
def simulated(*left_out: str) -> Generator[SimulatedDevice, None, None]:
    device = SimulatedDevice(left_out)
    simulate_device(_CPU, device)
    try:
        with device:
            yield device
    finally:
        device.left_out = frozenset()  # what is closed later may read
        simulate_device(_CPU, None)


def train(plan: fd.Plan, *, steps: int = 7, bad_step: int | None = 4) -> nn.Module:
    """Train with clipping, accumulation, a branch that one rank leaves out, and a step with infinity."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = fd.distribute(model, optimizer, plan)
    rank = fd.world().rank
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            x, y = data(8, seed=10 * step + part, width=WIDTH)
            loss = nn.functional.mse_loss(model(own(x), branch=step % 3 != 2 or rank == 0), own(y))
            if step == bad_step and rank == 1:
                loss = loss * torch.inf
            if part == 0:
                with fd.accumulate():
                    loss.backward()
            else:
                loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != bad_step:
            optimizer.step()
        else:
            assert not torch.isfinite(norm)
    assert_same_bits(model)
    return model


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, and what codecs keep."""
    reducer = reducer_of(model)
    assert reducer is not None
    kept = [value for entry in reducer.exchange_state().values() for value in entry.values()]
    return [each.detach() for each in [*model.parameters(), *kept] if torch.is_tensor(each)]


@pytest.mark.parametrize("codec", CODECS)
@ranks(2)
def test_the_bits_of_the_cpu_and_no_race(codec: str) -> None:
    fd.init()
    plan = fd.Plan(codec=codec, bucket_bytes=16384, first_bucket_bytes=1024, route="flat")
    expected = state_of(train(plan))
    with simulated() as device:
        model = train(plan)
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        found = state_of(model)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@ranks(2)
def test_buckets_are_those_of_a_device() -> None:
    fd.init()
    with simulated():
        model = Net()
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="int8"))
        model(torch.randn(4, WIDTH), branch=True).sum().backward()
        reducer = reducer_of(model)
        assert reducer is not None
        kinds = {type(bucket) for bucket in reducer.parts.buckets.buckets}
        assert DeviceCodedBucket in kinds
        assert "not in CPU memory" in reducer.route_reason


@pytest.mark.parametrize("left_out", ["launch", "end", "read"])
@pytest.mark.parametrize("codec", ["int8", "bf16"])
@ranks(2)
def test_a_wait_that_is_left_out_is_found(codec: str, left_out: str) -> None:
    fd.init()
    with simulated(left_out), pytest.raises(Race):
        train(fd.Plan(codec=codec, route="flat"))

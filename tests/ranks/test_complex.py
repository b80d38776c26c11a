"""Complex parameters have their exact mean, however gradients travel; no codec takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.engine.coded_bucket import CodedBucket
from farandole.comm.engine.grad_ownership import FlatGradients
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits
from tests.ranks.test_routes import pretend_two_hosts


class Filters(nn.Module):
    """Complex matrices of both widths, one that only rank 0 uses, and a real one large enough for a codec."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Parameter(torch.randn(64, 96, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.seldom = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.real = nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        total: torch.Tensor = (
            x.to(torch.complex64) @ self.wide
        ).abs().square().mean() + self.fine.abs().square().sum()
        total = total + self.real(x @ self.wide.real).square().mean()
        return total + (self.seldom * x[0, 0]).abs().sum() if seldom else total


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def check(steps: int = 5, **plan: Any) -> None:
    """Train beside one process that has the batches of all ranks."""
    world = fd.init()
    model, alone = Filters(), Filters()
    _, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 1e-3), fd.Plan(**plan))
    other = torch.optim.SGD(alone.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(world.rank, step), world.rank == 0).backward()
        optimizer.step()
        other.zero_grad()
        for rank in range(world.size):
            (alone(inputs(rank, step), rank == 0) / world.size).backward()
        other.step()
    assert_same_bits(model)
    exact = [name for name, _ in model.named_parameters() if name != "real.weight" or plan.get("codec") != "int8"]
    for name in exact:
        torch.testing.assert_close(model.get_parameter(name), alone.get_parameter(name), rtol=2e-4, atol=2e-5)
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    for bucket in reducer.buckets.buckets:
        assert isinstance(bucket.gradients, FlatGradients)
        complex_members = any(parameter.is_complex() for parameter in bucket.gradients.parameters)
        assert not complex_members or bucket.spec.is_exact


@pytest.mark.gate_cases("{'route': 'auto'}")
@pytest.mark.parametrize(
    "plan",
    [
        {"route": "flat"},
        {"route": "flat", "codec": "auto", "lossy": True},
        {"route": "flat", "codec": "int8"},
        {"route": "auto"},
    ],
    ids=str,
)
@ranks(2)
def test_by_every_route_of_two_ranks(plan: dict[str, Any]) -> None:
    check(**plan)


@pytest.mark.gate_cases("{'codec': 'int8'}")
@pytest.mark.parametrize("plan", [{}, {"codec": "int8"}, {"codec": "auto", "lossy": True}], ids=str)
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_across_hosts(plan: dict[str, Any]) -> None:
    pretend_two_hosts()
    check(**plan)


@ranks(2)
def test_a_codec_for_a_complex_parameter_is_refused_by_name() -> None:
    fd.init()
    model = Filters()
    text = (
        r"codec_for\.wide = 'int8', but parameter 'wide' is complex64, and codecs take float32; give it codec none"
    )
    with pytest.raises(fd.PlanError, match=text):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec_for={"wide": "int8"}))


@ranks(2)
def test_the_exact_carrier_sees_the_parts_of_complex_numbers() -> None:
    fd.init()
    model = Filters()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="auto", route="flat"))
    model(inputs(0, 0), True).backward()
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    for bucket in reducer.buckets.buckets:
        assert isinstance(bucket, CodedBucket)
        assert all(unit.is_floating_point() for unit in bucket._cut.units)

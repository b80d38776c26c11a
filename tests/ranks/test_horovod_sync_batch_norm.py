"""`hvd.SyncBatchNorm`: every rank normalises with the statistics of all samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from tests.ranks.pool import ranks


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 6)])
@ranks(2)
def test_output_gradients_and_statistics_are_those_of_one_process(shape: tuple[int, ...]) -> None:
    hvd.init()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, *shape[1:], generator=generator) * 3 + 1
    pull = torch.randn(x.shape, generator=generator)
    parts = [slice(0, 4), slice(4, 6)]  # unequal shares: counts travel, too
    mine = parts[hvd.rank()]
    layer, alone = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    alone._check_input_dim = lambda _: None  # type: ignore[method-assign,assignment] # any dimensions
    for norm in (layer, alone):
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
            norm.bias.fill_(0.5)
    a, b = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        y, expected = layer(a), alone(b)
        (y * pull[mine]).sum().backward()
        (expected * pull).sum().backward()
    torch.testing.assert_close(y, expected[mine], rtol=1e-5, atol=1e-5)
    assert a.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(a.grad, b.grad[mine], rtol=1e-4, atol=1e-4)
    for parameter, other in zip(layer.parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None
        total = hvd.allreduce(parameter.grad, op=hvd.Sum)
        torch.testing.assert_close(total, other.grad, rtol=1e-4, atol=1e-4)
    for buffer, expected_buffer in zip(layer.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected_buffer)
    layer.eval()
    alone.eval()
    torch.testing.assert_close(layer(a), alone(b)[mine])


@ranks(2)
def test_a_model_is_converted_copied_and_trained() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4, affine=False)))
    names = list(model.state_dict())
    weight = model[1].weight
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert list(model.state_dict()) == names
    assert model[1].weight is weight
    assert [type(m).__name__ for m in model.modules()].count("SyncBatchNorm") == 2
    twin = copy.deepcopy(model)
    x = torch.randn(4, 2, 6, 6) + hvd.rank()
    for net in (model, twin):
        net(x).square().mean().backward()
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
    layer: Any = model[1]
    means = hvd.allgather(layer.running_mean[None])
    assert torch.equal(means[0], means[1])
    with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
        layer(torch.ones(3))

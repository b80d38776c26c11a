"""From one rank to all: parameters, optimizers' state, objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from tests.ranks.pool import ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True},
    "AdamW": {"lr": 0.1, "foreach": True},
    "Adamax": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "Adadelta": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.1},
    "ASGD": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
}


def model() -> nn.Module:
    torch.manual_seed(hvd.rank())
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    net(torch.randn(4, 2, 3, 3, generator=generator)).square().sum().backward()
    optimizer.step()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


@ranks(2)
def test_parameters() -> None:
    hvd.init()
    net = model()
    mine = {name: value.clone() for name, value in net.state_dict().items()}
    everybody = hvd.allgather_object(mine)
    assert not equal(everybody[0], everybody[1])
    hvd.broadcast_parameters(net.state_dict(), root_rank=1)
    assert equal(dict(net.state_dict()), everybody[1])
    net = model()
    hvd.broadcast_parameters(list(net.named_parameters()), 0)
    assert all(equal(each.detach(), everybody[0][name]) for name, each in net.named_parameters())
    net = model()
    hvd.broadcast_parameters(list(net.parameters()), 0)
    assert all(equal(each.detach(), everybody[0][name]) for name, each in net.named_parameters())
    net = model()
    torch.nn.utils.convert_conv2d_weight_memory_format(net, torch.channels_last)  # not contiguous
    hvd.broadcast_parameters(net.state_dict(), 1)
    assert all(torch.equal(value, everybody[1][name]) for name, value in net.state_dict().items())
    assert not next(net.parameters()).is_contiguous()
    with pytest.raises(ValueError, match="invalid params of type: <class 'generator'>"):
        hvd.broadcast_parameters(net.parameters(), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'x' is a int, expected a tensor"):
        hvd.broadcast_parameters({"x": 1}, 0)  # type: ignore[dict-item]


@ranks(2)
def test_optimizers_that_were_used_at_the_root_alone() -> None:
    hvd.init()
    assert set(OPTIMIZERS) <= set(dir(torch.optim))
    for name, options in OPTIMIZERS.items():
        net = model()
        kind = getattr(torch.optim, name)
        optimizer = kind(net.parameters(), **(options if hvd.rank() == 0 else {"lr": 0.5}))
        if hvd.rank() == 0:
            step(net, optimizer, 1)
            step(net, optimizer, 2)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert equal(dict(net.state_dict()), before), f"{name} changed parameters"
        states = hvd.allgather_object(optimizer.state_dict())
        assert states[0]["state"], name
        assert equal(states[0], states[1]), name
        # From here on both do the same.
        hvd.broadcast_parameters(net.state_dict(), 0)
        step(net, optimizer, 3)
        after = hvd.allgather_object(net.state_dict())
        assert equal(dict(after[0]), dict(after[1])), name


@ranks(2)
def test_optimizers_that_nobody_has_used() -> None:
    hvd.init()
    net = model()
    options = {"lr": 0.25, "weight_decay": 0.5} if hvd.rank() else {"lr": 0.1}
    optimizer = torch.optim.Adam(net.parameters(), **options)  # type: ignore[arg-type]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=net)
    assert equal(dict(net.state_dict()), before)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.25, 0.5)
    assert all(each.grad is None for each in net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(net, optimizer, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.state[net[0].weight]["step"].item() == 1.0  # type: ignore[index]


@ranks(2)
def test_optimizers_that_cannot_be_broadcast() -> None:
    hvd.init()
    net = model()
    with pytest.raises(ValueError, match=r"cannot broadcast torch\.optim\.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0)
    unlike = torch.optim.SGD(list(net.parameters())[: 2 + hvd.rank()], lr=0.1)
    if hvd.rank() == 0:
        hvd.broadcast_optimizer_state(unlike, 0)
    else:
        with pytest.raises(ValueError, match="parameter group"):
            hvd.broadcast_optimizer_state(unlike, 0)
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@pytest.mark.full("further")
@ranks(3)
def test_objects() -> None:
    hvd.init()
    mine = {"rank": hvd.rank(), "list": list(range(hvd.rank() * 1000)), None: torch.ones(hvd.rank())}
    received = hvd.broadcast_object(mine, root_rank=2)
    assert received["rank"] == 2
    assert len(received["list"]) == 2000
    assert hvd.broadcast_object(None if hvd.rank() else "from 0", name="object") == "from 0"
    assert hvd.broadcast_object(b"", 1) == b""
    gathered = hvd.allgather_object(mine)
    assert [each["rank"] for each in gathered] == [0, 1, 2]
    assert [len(each[None]) for each in gathered] == [0, 1, 2]
    assert hvd.allgather_object("x" * hvd.rank(), name="texts") == ["", "x", "xx"]

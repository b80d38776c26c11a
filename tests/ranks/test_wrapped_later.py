"""torch's own wrappers around a model that was distributed: refused by name on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from tests.ranks.pool import ranks


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def distributed() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    fd.init()
    model = model_of()
    return fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


@ranks(2)
def test_ddp_around_a_distributed_model() -> None:
    model, _ = distributed()
    with pytest.raises(fd.ConfigError, match=r"Sequential .* wrapped in DistributedDataParallel .* twice"):
        DistributedDataParallel(model)(torch.ones(2, 8))


@ranks(2)
def test_ddp_around_a_model_that_has_a_distributed_one() -> None:
    model, _ = distributed()
    with pytest.raises(fd.ConfigError, match="leave DistributedDataParallel out"):
        DistributedDataParallel(nn.Sequential(model, nn.Linear(1, 1)))(torch.ones(2, 8))


@ranks(2)
def test_ddp_after_some_steps() -> None:
    model, optimizer = distributed()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(fd.ConfigError, match="exchanged twice"):
        DistributedDataParallel(model)(torch.ones(2, 8))


@ranks(2)
def test_a_distributed_teacher_beside_a_model_in_ddp_is_no_mistake() -> None:
    model, optimizer = distributed()

    class Student(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x) + model(x)
            return out

    student = DistributedDataParallel(Student(8, 1))
    student(torch.ones(2, 8)).sum().backward()
    optimizer.step()


@pytest.mark.gate_cases("only a layer")
@pytest.mark.parametrize("kind", ["fully_shard", "only a layer", "FullyShardedDataParallel"])
@ranks(2)
def test_fsdp_after_distribute(kind: str) -> None:
    model, _ = distributed()
    if kind == "fully_shard":
        fully_shard(model)
        wrapped: nn.Module = model
    elif kind == "only a layer":
        fully_shard(model[0])
        wrapped = model
    else:
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with pytest.raises(fd.ConfigError, match=r"Sequential went through farandole.distribute, and FSDP .* taken"):
        wrapped(torch.ones(2, 8))

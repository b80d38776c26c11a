"""Stock FSDP2, tensor parallelism and DTensor on gloo and on the back end "farandole": equal to the bit."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks.backend_script import begin


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))


def losses(model: Any, seed: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    found = []
    for _ in range(3):
        loss = model(torch.randn(8, 32)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def sharded_losses(backend: str) -> list[float]:
    begin(backend)
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its older names
        mesh = init_device_mesh("cpu", (2,))
        model = layers()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        found = losses(fully_shard(model, mesh=mesh), seed=rank)
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        found += losses(parallelize_module(layers(), mesh, plan), seed=7)
        rows = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        assert columns.to_local().tolist() == torch.arange(24.0).view(4, 6).chunk(2, 1)[rank].tolist()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    import farandole.backend  # noqa: F401 - it registers the name

    expected = sharded_losses("gloo")
    assert sharded_losses("farandole") == expected, "other losses than gloo's"
    print("over", flush=True)

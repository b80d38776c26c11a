"""A script of somebody who has not heard of Farandole: it asks for gloo, or for no backend, and trains with DDP.

`tests/ranks/test_stock_scripts.py` starts it with and without ``--backend farandole``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def gradients_with(backend: str) -> dict[str, Any]:
    dist.init_process_group(backend or None)
    subgroup = dist.new_group([1, 0])
    gloo = dist.new_group([0, 1], backend="gloo")
    everyone: Any = dist.group.WORLD
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(30, 40))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(8, 30)).pow(2).mean().backward()
    total = torch.stack([p.grad.sum() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(total, group=gloo)
    if dist.get_backend() == "gloo":
        dist.monitored_barrier()
    told = {
        "gradient": total.tolist(),
        "asked": dist.get_backend(),
        "config": dist.get_backend_config(),
        "names": [str(group.name()) for group in (everyone, subgroup, gloo)],
    }
    dist.destroy_process_group()
    return told


if __name__ == "__main__":
    found = [gradients_with(backend) for backend in sys.argv[1:]]
    if "sitecustomize" in sys.modules:
        found.append({"customised": vars(sys.modules["sitecustomize"]).get("MARK")})
    print(json.dumps(found))

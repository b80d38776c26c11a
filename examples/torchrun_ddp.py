"""A stock torchrun script with `DistributedDataParallel`: one changed word puts it on Farandole's process group.

    torchrun --nproc-per-node 2 examples/torchrun_ddp.py                                    # on gloo
    torchrun --nproc-per-node 2 examples/torchrun_ddp.py farandole                          # the changed word
    farandole run -np 2 --backend farandole -- python examples/torchrun_ddp.py              # nothing changed

The word is the backend's name; `import farandole.backend` makes it known to torch. The losses are equal.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import farandole.backend  # noqa: F401  # it registers the name "farandole"


def main(backend: str) -> None:
    dist.init_process_group(backend)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(40):
        inputs = torch.randn(32, 20)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(mean := loss.detach(), dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        name = dist.group.WORLD.name()
        print(f"backend {name}, loss {mean.item() / dist.get_world_size():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gloo")

"""A stock training script but for the back end's name; and ranks that die or leave without a word.

Its last line says what this rank met.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
_numbers = itertools.count()


def begin(backend: str) -> None:
    """Make the default group, for a script that makes several: at one store, which outlives them all.

    Each store that torch makes itself listens at MASTER_PORT. A rank that comes for the next group before rank 0
    has closed the last one's store connects to that, and is reset; rank 0 then waits for it five minutes.
    """
    store = dist.PrefixStore(f"group {next(_numbers)}", _store())
    dist.init_process_group(
        backend, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )


@functools.cache
def _store() -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, int(os.environ["WORLD_SIZE"]), is_master=os.environ["RANK"] == "0")


def losses(steps: int, dies_at: int = -1) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 600), torch.nn.ReLU(), torch.nn.Linear(600, 1000)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    found = []
    for step in range(steps):
        if step == dies_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        images, labels = torch.randn(8, 32), torch.randint(1000, (8,))
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def stock(backend: str) -> list[float]:
    begin(backend)
    found = losses(STEPS)
    dist.barrier()
    dist.destroy_process_group()
    return found


def leave() -> None:
    """End with groups that are open, operations that wait, and work that nobody has waited for."""
    dist.init_process_group("farandole")
    pairs = [dist.new_group(), dist.new_group([0]), dist.new_group(backend="cpu:gloo")]
    rank = dist.get_rank()
    kept = [dist.all_reduce(torch.ones(1000), group=pairs[0], async_op=True), dist.irecv(torch.ones(3), 1 - rank)]
    if rank == 0:
        kept.append(dist.barrier(async_op=True))
        kept.append(dist.isend(torch.ones(3), 1, tag=9))
    print("over", flush=True)
    sys.exit(3)


def main(what: str) -> None:
    if what == "train":
        expected = stock("gloo")
        for backend in ("farandole", "cpu:farandole"):
            assert stock(backend) == expected, "other losses than gloo's"
        begin("farandole")
        value = torch.ones(1)
        dist.all_reduce(value)  # and leave without destroying the group
    elif what == "leave":
        leave()
    else:
        dist.init_process_group("farandole")
        try:
            losses(STEPS, dies_at=2)
        except Exception as problem:
            print(f"{type(problem).__name__}: {problem}".replace("\n", " "))
        try:
            dist.barrier()
        except Exception as problem:
            print(f"{type(problem).__name__}: {problem}")
    print("over", flush=True)


if __name__ == "__main__":
    import farandole.backend  # noqa: F401 - it registers the name

    main(sys.argv[1])

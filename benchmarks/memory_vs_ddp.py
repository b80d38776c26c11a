"""Peak memory of a training beside stock DistributedDataParallel: one trainer a run, so that all start alike.

    farandole run -np 2 --quiet -- python benchmarks/memory_vs_ddp.py TRAINER

Trainers are ddp, ddp-view (`gradient_as_bucket_view=True`), flat and shared (Farandole's routes). Printed is how
far a rank's peak lies above what was resident before the model was distributed: gradients, buckets, the
optimizer's state, and what the backend and the allocator hold. A page that several ranks share counts in parts.

With --in-use all large blocks go back to the kernel when they are freed, so the peak is of memory in use. Without
it the allocator is as each trainer has it: `fd.init` tells it to keep freed memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd

WIDTH, LAYERS, STEPS = 1024, 16, 6
KIB = 1024
M_MMAP_THRESHOLD, LEAST_MAPPED_BYTES = -3, 65536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["ddp", "ddp-view", "flat", "shared"])
    parser.add_argument("--in-use", action="store_true", help="let the allocator keep no freed memory")
    arguments = parser.parse_args()
    trainer = arguments.trainer
    if arguments.in_use:
        _return_freed_memory()
    stock = trainer.startswith("ddp")
    if stock:
        dist.init_process_group("gloo")  # and nothing of ours, which tunes the allocator too
    else:
        fd.init(device="cpu", progress=False)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, WIDTH, generator=generator)

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = _kib("status", "VmHWM")
    if stock:
        model = DistributedDataParallel(model, gradient_as_bucket_view=trainer == "ddp-view")
    else:
        fd.distribute(model, optimizer, fd.Plan(route=trainer))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    others = _kib("status", "RssShmem") - _kib("smaps_rollup", "Pss_Shmem")
    peak = torch.tensor(_kib("status", "VmHWM") - before - others)

    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        result = {
            "trainer": trainer,
            "in_use": arguments.in_use,
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, torch {torch.__version__}, {dist.get_world_size()} ranks",
            "gradient_bytes": gradient_bytes,
            "optimizer_bytes": gradient_bytes,
            "peak_bytes": KIB * int(peak),
        }
        print(json.dumps(result), flush=True)
    if stock:
        del model  # the wrapper keeps the group, which must be gone before the process is
        dist.destroy_process_group()
    else:
        fd.shutdown()


def _return_freed_memory() -> None:
    """Give every large block a mapping of its own, and let `fd.init` leave the allocator as it is."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(LEAST_MAPPED_BYTES)
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LEAST_MAPPED_BYTES), "glibc's malloc takes the option"


def _kib(file: str, field: str) -> int:
    """Return a field of a file of this process in /proc."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


if __name__ == "__main__":
    main()

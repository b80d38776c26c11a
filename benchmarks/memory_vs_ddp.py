"""Peak memory of a training beside stock DistributedDataParallel: one trainer a run, so that all start alike.

    farandole run -np 2 --quiet -- python benchmarks/memory_vs_ddp.py TRAINER

Trainers are ddp, ddp-view (`gradient_as_bucket_view=True`), flat and shared (Farandole's routes). Printed is how
far a rank's peak lies above what was resident before the model was distributed: gradients, buckets, the
optimizer's state, and what the backend and the allocator hold. A page that several ranks share counts in parts.

With --in-use all large blocks go back to the kernel when they are freed, so the peak is of memory in use. Without
it the allocator is as each trainer has it: `fd.init` tells it to keep freed memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from models import mean_square_loss, step_of
from shared import give_back_large_blocks, make_parser, peak_bytes_from_now, report

WIDTH, LAYERS, STEPS = 1024, 16, 6
KIB = 1024


def main() -> None:
    parser = make_parser(__doc__, in_use=(False, "let the allocator keep no freed memory"))
    parser.add_argument("trainer", choices=["ddp", "ddp-view", "flat", "shared"])
    arguments = parser.parse_args()
    trainer = arguments.trainer
    if arguments.in_use:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(give_back_large_blocks())  # so `fd.init` leaves it as it is
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

    peak_bytes = peak_bytes_from_now()
    if stock:
        model = DistributedDataParallel(model, gradient_as_bucket_view=trainer == "ddp-view")
    else:
        fd.distribute(model, optimizer, fd.Plan(route=trainer))
    step = step_of(model, mean_square_loss(x), optimizer)
    for _ in range(STEPS):
        step()
    of_other_ranks = _kib("status", "RssShmem") - _kib("smaps_rollup", "Pss_Shmem")
    peak = torch.tensor(peak_bytes() - KIB * of_other_ranks)

    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    report({
        "trainer": trainer, "in_use": arguments.in_use, "gradient_bytes": gradient_bytes,
        "optimizer_bytes": gradient_bytes, "peak_bytes": int(peak),
    })  # fmt: skip
    if stock:
        del model, step  # the wrapper keeps the group, which must be gone before the process is
        dist.destroy_process_group()
    else:
        fd.shutdown()


def _kib(file: str, field: str) -> int:
    """Return a field of a file of this process in /proc."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


if __name__ == "__main__":
    main()

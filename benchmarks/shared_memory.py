"""All-reduce in shared memory beside gloo's over loopback, interleaved in one run.

    farandole run -np 2 -- python benchmarks/shared_memory.py

Per size: gloo on an ordinary tensor, a `SharedTensor` in place, and an ordinary tensor that is copied into
a `SharedTensor` and out again, in turns; and as a floor every rank's reading and writing its own tensor once,
which moves as many bytes as an all-reduce in place must (small ones stay in the cache there). A sample is a
few calls in a row; a sample's time is that of its slowest rank. Printed are medians in ms and gloo's median
over ours. One thread a rank; `farandole run` binds each to its cores when there are enough.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import farandole as fd
from farandole.comm.transport.shared_tensor import SharedMemory
from shared import medians_ms, read_options, report, slowest_in_turns


def ways(memory: SharedMemory, elements: int) -> dict[str, Callable[[], None]]:
    """Return the operations to compare, each on its own float32 tensor of zeros."""
    apart, outside = torch.zeros(elements), torch.zeros(elements)
    shared = memory.allocate(elements, torch.float32)

    def copied() -> None:
        shared.mine.copy_(outside)
        shared.all_reduce()
        outside.copy_(shared.mine)

    def touch() -> None:
        shared.mine.mul_(1)

    return {
        "gloo": lambda: dist.all_reduce(apart),
        "shared": shared.all_reduce,
        "copied": copied,
        "floor": touch,
    }


def main() -> None:
    arguments = read_options(__doc__, mb=[0.004, 1, 25, 100], samples=11)
    world = fd.init()
    torch.set_num_threads(1)
    memory = SharedMemory.connect(world, timeout_seconds=60)
    for megabytes in arguments.mb:
        calls = max(1, min(50, int(25 / megabytes)))
        times = slowest_in_turns(ways(memory, int(megabytes * 1e6 / 4)), arguments.samples, repeats=calls)
        medians = medians_ms(times, 4)
        report({
            "ranks": world.local_size, "mb": megabytes, "median_ms": medians,
            "gloo_over": {name: round(medians["gloo"] / medians[name], 1) for name in ("shared", "copied")},
        })  # fmt: skip
    memory.close()


if __name__ == "__main__":
    main()

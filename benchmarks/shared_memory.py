"""All-reduce in shared memory beside gloo's over loopback, interleaved in one run.

    farandole run -np 2 -- python benchmarks/shared_memory.py

Per size: gloo on an ordinary tensor, a `SharedTensor` in place, and an ordinary tensor that is copied into
a `SharedTensor` and out again, in turns; and as a floor every rank's reading and writing its own tensor once,
which moves as many bytes as an all-reduce in place must (small ones stay in the cache there). A sample is a
few calls in a row; a sample's time is that of its slowest rank. Printed are medians in ms and gloo's median
over ours. One thread a rank; `farandole run` binds each to its cores when there are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.distributed as dist

import farandole as fd
from farandole.comm.host_memory.shared_tensor import SharedMemory


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


def measure(operations: dict[str, Callable[[], None]], samples: int, calls: int) -> dict[str, float]:
    """Return the median over samples of a call's time, in ms; a sample's time is its slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for sample in range(samples + 1):
        for name in operations if sample % 2 else reversed(operations):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                operations[name]()
            times[name].append((time.perf_counter() - begin) / calls)
    medians = {}
    for name, values in times.items():
        slowest = torch.tensor(values[1:], dtype=torch.float64)  # the first warms up
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        medians[name] = 1e3 * statistics.median(slowest.tolist())
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[0.004, 1, 25, 100])
    parser.add_argument("--samples", type=int, default=11)
    arguments = parser.parse_args()
    world = fd.init()
    torch.set_num_threads(1)
    memory = SharedMemory.connect(world, timeout_seconds=60)
    for megabytes in arguments.mb:
        calls = max(1, min(50, int(25 / megabytes)))
        medians = measure(ways(memory, int(megabytes * 1e6 / 4)), arguments.samples, calls)
        result = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "ranks": world.local_size,
            "mb": megabytes,
            "median_ms": {name: round(value, 4) for name, value in medians.items()},
            "gloo_over": {name: round(medians["gloo"] / medians[name], 1) for name in ("shared", "copied")},
        }
        if world.rank == 0:
            print(json.dumps(result), flush=True)
    memory.close()


if __name__ == "__main__":
    main()

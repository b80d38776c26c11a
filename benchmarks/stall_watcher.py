"""What the watcher for ranks that stand still costs a step: blocks of steps with it and without, in turn.

    farandole run -np 2 -- python benchmarks/stall_watcher.py --pairs 30

Rank 0 prints the difference of the mean step (the median over pairs of neighbouring blocks, with its 95 %
interval) and the CPU time of the watcher's thread.
"""

from __future__ import annotations

import random
import statistics
import threading
import time

import torch
from torch import nn

import farandole as fd
from farandole.bench.intervals import median_interval
from models import step_of
from shared import read_options, timed

STALL_SECONDS = 10.0


def main() -> None:
    """Measure, and print on rank 0."""
    options = read_options(__doc__, pairs=30, seconds=(2.0, "of a block"))
    world = fd.init(progress=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))

    step = step_of(model, lambda model: nn.functional.cross_entropy(model(x), y), optimizer)

    def block(steps: int) -> float:
        return timed(step, steps)()

    block(200)
    count = int(fd.mean(options.seconds / block(200)))
    draw = random.Random(0)
    differences, plain = [], []
    begin, cpu = time.perf_counter(), thread_seconds()
    for _ in range(options.pairs):
        found = {}
        for watches in draw.sample([True, False], 2):
            world.session.stall_seconds = STALL_SECONDS if watches else 0.0
            found[watches] = block(count)
        differences.append(found[True] - found[False])
        plain.append(found[False])
    seconds, used = time.perf_counter() - begin, thread_seconds() - cpu
    if world.is_main:
        middle, (low, high) = median_interval(differences)
        print(f"step {statistics.median(plain) * 1e6:.1f} us, {count} steps a block, {options.pairs} pairs")
        print(f"with the watcher {middle * 1e6:+.2f} us a step ({low * 1e6:+.2f} to {high * 1e6:+.2f})")
        print(f"its thread used {used * 1e3:.2f} ms of CPU in {seconds:.0f} s ({used / seconds:.5%} of a core)")


def thread_seconds() -> float:
    """Return the CPU time that the watcher's thread has used."""
    (thread,) = (each for each in threading.enumerate() if each.name == "farandole-stall")
    assert thread.ident is not None, "it runs"
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


if __name__ == "__main__":
    main()

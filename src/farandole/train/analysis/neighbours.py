"""Processes that compute beside what is timed, as the other ranks of a host will.

Ranks of one host share its caches, its memory and its clock: a pass that is timed while the other cores sleep is
faster than any in training.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WIDTH, _ROWS = 512, 1024
START_SECONDS = 60.0
"""How long a neighbour may take to import torch."""


@contextmanager
def neighbours(count: int, threads: int) -> Iterator[None]:
    """Let `count` processes compute with `threads` each, as far as there are cores for them.

    A neighbour that does not start is left out. They end with this process, however it ends.
    """
    count = max(0, min(count, len(os.sched_getaffinity(0)) // threads - 1))
    command = [sys.executable, "-m", __name__, str(threads)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        while len(running) < count:
            running += [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)]
        for each in running:
            assert each.stdout is not None, "it has a pipe"
            if select.select([each.stdout], [], [], START_SECONDS)[0]:
                each.stdout.read(1)
        yield
    finally:
        for each in running:
            each.kill()
            each.communicate()


def main() -> None:
    """Compute forward and backward of a layer until stdin ends, which it does with the parent."""
    import torch
    from torch import nn

    torch.set_num_threads(int(sys.argv[1]))
    layer = nn.Linear(_WIDTH, _WIDTH)
    x = torch.ones(_ROWS, _WIDTH, dtype=torch.float32, device="cpu", requires_grad=True)
    sys.stdout.write(".")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        nn.functional.gelu(layer(x)).sum().backward()


if __name__ == "__main__":
    main()

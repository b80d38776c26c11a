"""The script that every scheduler starts unchanged, and what it must have printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLACE = """
import json
import farandole as fd

world = fd.init()
mean = fd.mean(world.rank)
print(json.dumps([world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.node_count,
                  world.source, mean]), flush=True)
"""

HOROVOD_PLACE = """
import json
import torch
import farandole.horovod.torch as hvd

hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="total").item()
print(json.dumps([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
                  total]), flush=True)
hvd.shutdown()
"""
"""The same in Horovod's names."""

TOLD = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
print([int(os.environ[name]) for name in names])
"""

UNTIL_WARNED = """
import time
import farandole as fd

world = fd.init(timeout_seconds=60)
steps = 0
while not fd.preempted():
    if steps == 0 and world.rank == 0:
        open("looping", "w").close()
    time.sleep(0.05)
    steps += 1
    assert steps < 1000, "nobody warned"
print("saved", world.rank, steps, flush=True)
"""


def write(directory: Path, text: str) -> str:
    """Write the script; return its name."""
    (directory / "train.py").write_text(text)
    return "train.py"


def printed(text: str) -> list[list[Any]]:
    """Return the lines of `PLACE`, by rank, whatever stands before them on the line."""
    return sorted(json.loads(line[line.index("[", 1) if line.startswith("[") and "] [" in line else 0 :])
                  for line in text.splitlines() if line.endswith("]"))  # fmt: skip

"""Context parallel beside one rank of one thread: time and memory of causal attention over a long sequence.

    farandole run -np 2 --set context=2 -- python benchmarks/context_parallel.py
    farandole run -np 2 --set context=2 -- python benchmarks/context_parallel.py --memory
    farandole run -np 1 -- python benchmarks/context_parallel.py --memory

A step is the forward and backward pass of attention layers with projections, each rank with one thread. Time: the
plain model on rank 0 alone, and the divided one on all ranks, take turns; a sample's time is that of its slowest
rank. Printed: medians in seconds, and the median of the plain time over the divided one by neighbours in time.
Memory, in a fresh process: the bytes that the graph keeps for backward, and the peak of the resident memory above
what the process had before the step.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json


class Attention(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        query, key, value = self.before(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: torch.Tensor = x + self.after(seen.transpose(1, 2).flatten(2))
        return mixed


def make_model(arguments: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Attention(arguments.width, arguments.heads) for _ in range(arguments.layers)))


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Return the seconds of one forward and backward pass."""
    begin = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - begin


def read_memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {name}"
    return int(found[1]) * 1024


def measure_memory(model: nn.Module, x: torch.Tensor, short: torch.Tensor) -> dict[str, float]:
    """Return MB kept for backward, and the peak of a step; `short` warms up what is made once."""
    step(model, short)
    kept: dict[int, int] = {}
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    del loss
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = read_memory("VmRSS")
    step(model, x)
    return {"kept_mb": sum(kept.values()) / 1e6, "peak_mb": (read_memory("VmHWM") - before) / 1e6}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="measure memory, and no time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = fd.init(progress=False)
    model = make_model(arguments)
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
    torch.manual_seed(2)
    whole = torch.randn(1, arguments.tokens, arguments.width)
    part = fd.context_shard(whole)
    short = fd.context_shard(whole[:, : 4 * world.size])
    if arguments.memory:
        if world.size == 1:
            model = make_model(arguments)
        del whole
        found = all_gather_json(world, "memory", measure_memory(model, part, short))
        if world.is_main:
            print(json.dumps({"ranks": world.size, **{key: max(each[key] for each in found) for key in found[0]}}))
        return
    plain = make_model(arguments)
    step(model, short)
    pairs = []
    for _ in range(arguments.samples):
        fd.barrier()
        alone_seconds = step(plain, whole) if world.is_main else 0.0
        fd.barrier()
        pairs.append(
            [
                max(each)
                for each in zip(*all_gather_json(world, "s", [alone_seconds, step(model, part)]), strict=True)
            ]
        )
    if world.is_main:
        alone, divided = (statistics.median(times) for times in zip(*pairs, strict=True))
        faster = statistics.median(pair[0] / pair[1] for pair in pairs)
        print(json.dumps({"plain_seconds": alone, "divided_seconds": divided, "times_faster": faster}))


if __name__ == "__main__":
    main()

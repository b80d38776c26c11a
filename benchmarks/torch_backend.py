"""The backend "farandole" of torch.distributed beside gloo, interleaved in one run, on stock PyTorch.

    farandole run -np 2 --quiet -- python benchmarks/torch_backend.py small ddp tensor-parallel
    farandole emulate --hosts 4 --rate 1gbit -- python benchmarks/torch_backend.py fsdp --gigabits 1

- ``small``: single collectives. A sample is several calls in a row.
- ``ddp``: a step of DistributedDataParallel on language models of 0.9 and 25 million parameters.
- ``tensor-parallel``: a transformer block of width 1024 on 512 tokens, by ColwiseParallel and RowwiseParallel,
  forward and backward; and its exchanges alone: four sums of 2 MiB.
- ``fsdp``: a step of FSDP2. Layers sleep instead of computing, so that more ranks than cores can be measured:
  what is left is time on the wire that sleeping does not hide. `--gigabits` adds the time that the bytes of its
  all-gathers and reduce-scatters take at least on a host's link.

Both backends are groups of the same processes. They take turns sample by sample, A B B A. A sample's time
is that of its slowest rank. Printed are medians in ms and the median of gloo's time over ours, by neighbours in
time, with a 95 % bootstrap interval. One thread a rank; `farandole run` binds each
to its core when there are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interleaved import build, paired  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
import farandole.backend
from farandole.bench.models.language import LanguageModel

BACKENDS = ("gloo", "farandole")
SMALL_BYTES = (8, 4096, 65536, 2**20, 25 * 2**20)
WIDTH, TOKENS, HEADS = 1024, 512, 16
Groups = Mapping[str, Any]


def measure(calls: Mapping[str, Callable[[], object]], samples: int, repeats: int) -> dict[str, Any]:
    """Return the medians of one call of each backend, and gloo's time over ours."""
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for sample in range(samples + 1):
        for name in BACKENDS if sample % 2 else reversed(BACKENDS):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            times[name].append((time.perf_counter() - begin) / repeats)
    slowest = {}
    for name, values in times.items():
        tensor = torch.tensor(values[1:], dtype=torch.float64)  # the first warms up
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        slowest[name] = tensor.tolist()
    ratio, interval = paired(slowest["gloo"], slowest["farandole"])
    medians = {name: round(1e3 * statistics.median(values), 4) for name, values in slowest.items()}
    return {"median_ms": medians, "gloo_over_farandole": ratio, "interval": interval}


def small_calls(group: Any, byte_count: int) -> dict[str, Callable[[], object]]:
    """Return the collectives, on float32 tensors of `byte_count` a rank."""
    size, rank = group.size(), group.rank()
    count = max(size, byte_count // 4 // size * size)
    whole, part = torch.ones(count), torch.ones(count // size)
    other = torch.ones(count)

    def point_to_point() -> None:
        peer = rank ^ 1
        if peer >= size:
            return
        if rank < peer:
            dist.send(whole, group=group, group_dst=peer)
            dist.recv(other, group=group, group_src=peer)
        else:
            dist.recv(other, group=group, group_src=peer)
            dist.send(whole, group=group, group_dst=peer)

    return {
        "all_reduce": lambda: dist.all_reduce(whole.fill_(1.0), group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole.fill_(1.0), group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
        "send and recv": point_to_point,
    }


def small(groups: Groups, arguments: argparse.Namespace) -> None:
    for byte_count in SMALL_BYTES:
        calls = {name: small_calls(group, byte_count) for name, group in groups.items()}
        for name in calls["gloo"]:
            if arguments.only and name not in arguments.only:
                continue
            repeats = max(1, min(50, 4 * 2**20 // byte_count))
            found = measure({each: calls[each][name] for each in BACKENDS}, arguments.samples, repeats)
            report("small", {"collective": name, "bytes": byte_count}, found)


def ddp(groups: Groups, arguments: argparse.Namespace) -> None:
    make, loss_of = build("lm")
    tokens = torch.randint(0, 256, (2, 129), generator=torch.Generator().manual_seed(dist.get_rank()))

    def large() -> nn.Module:
        return LanguageModel(width=512, depth=8, heads=8, context=128)

    def loss_of_large(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    for maker, loss in ((make, loss_of), (large, loss_of_large)):
        steps, count = {}, 0
        for name, group in groups.items():
            torch.manual_seed(0)
            model = DistributedDataParallel(maker(), process_group=group)
            count = sum(parameter.numel() for parameter in model.parameters())
            steps[name] = step_of(model, partial(loss, model))
        report("ddp", {"model": f"lm, {count / 1e6:.1f} million"}, measure(steps, arguments.samples, 1))


class Block(nn.Module):
    """Attention and a two-layer perceptron, with as many heads as this rank has."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, length, width)."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def tensor_parallel(groups: Groups, arguments: argparse.Namespace) -> None:
    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    plan: Any = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    steps, exchanges = {}, {}
    tokens = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    for name, group in groups.items():
        torch.manual_seed(0)
        block = Block(HEADS // group.size())
        mesh = DeviceMesh.from_group(group, "cpu")
        parallel = parallelize_module(block, mesh, plan)
        steps[name] = step_of(parallel, partial(mean_square, parallel, tokens))
        message = torch.zeros(1, TOKENS, WIDTH)

        def four(message: torch.Tensor = message, group: Any = group) -> None:
            for _ in range(4):
                dist.all_reduce(message, group=group)

        exchanges[name] = four
    shape = {"width": WIDTH, "tokens": TOKENS}
    report("tensor-parallel", shape, measure(steps, arguments.samples, 1))
    report("tensor-parallel, its four sums alone", shape, measure(exchanges, arguments.samples, 1))


class _Sleep(torch.autograd.Function):
    """Lets time pass as a layer's arithmetic would: once forward and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        time.sleep(seconds)
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], gradients[0].new_ones(1).expand(ctx.shape), None


class SleepingLayer(nn.Module):
    """A layer with parameters, whose arithmetic is sleep."""

    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return the same shape."""
        out: torch.Tensor = _Sleep.apply(x, self.weight, self.seconds)
        return out


def fsdp(groups: Groups, arguments: argparse.Namespace) -> None:
    layers, elements = arguments.layers, int(arguments.million / arguments.layers * 1e6)
    steps = {}
    for name, group in groups.items():
        mesh = DeviceMesh.from_group(group, "cpu")
        seconds = arguments.compute_seconds / layers / 3
        model = nn.Sequential(*(SleepingLayer(elements, seconds) for _ in range(layers)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps[name] = step_of(model, partial(mean_square, model, torch.ones(4)))
    size = dist.get_world_size()
    facts: dict[str, Any] = {
        "million parameters": arguments.million,
        "compute_ms": 1e3 * arguments.compute_seconds,
    }
    if arguments.gigabits:
        hosts = fd.world().node_count
        # Every parameter is gathered twice and its gradient scattered once; a host sends what others have not.
        facts["wire_bound_ms"] = round(
            1e3 * 3 * layers * elements * 4 * (hosts - 1) / hosts / (arguments.gigabits * 1e9 / 8), 1
        )
    facts["ranks"] = size
    report("fsdp", facts, measure(steps, arguments.samples, 1))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out.square().mean()


def step_of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def report(part: str, facts: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if dist.get_rank() == 0:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        whole = {"part": part, **facts, **found, "ranks": dist.get_world_size(), "machine": machine}
        print(json.dumps({**whole, "date": date.today().isoformat()}), flush=True)


PARTS: dict[str, Callable[[Groups, argparse.Namespace], None]] = {
    "small": small,
    "ddp": ddp,
    "tensor-parallel": tensor_parallel,
    "fsdp": fsdp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--only", nargs="+", help="of the small collectives")
    parser.add_argument("--gigabits", type=float, default=0.0, help="a second, of each host's link, for the bound")
    parser.add_argument("--million", type=float, default=27.0, help="parameters of fsdp's model")
    parser.add_argument("--layers", type=int, default=9, help="of fsdp's model")
    parser.add_argument("--compute-seconds", type=float, default=0.6, help="of fsdp's model, a step")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's own, of its older names
    torch.set_num_threads(1)
    fd.init()
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    for part in arguments.parts:
        PARTS[part](groups, arguments)
    dist.barrier()
    for group in groups.values():
        dist.destroy_process_group(group)
    fd.shutdown()


if __name__ == "__main__":
    main()

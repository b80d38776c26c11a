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
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
import farandole.backend
import models
from shared import make_parser, medians_ms, paired, report, slowest_in_turns, stage_3_bound_ms

BACKENDS = ("gloo", "farandole")
SMALL_BYTES = (8, 4096, 65536, 2**20, 25 * 2**20)
Groups = Mapping[str, Any]


def measure(
    part: str, facts: Mapping[str, Any], calls: Mapping[str, Callable[[], object]], samples: int, repeats: int = 1
) -> None:
    """Report the medians of one call of each backend, and gloo's time over ours."""
    times = slowest_in_turns(calls, samples, repeats=repeats)
    ratio, interval = paired(times["gloo"], times["farandole"])
    report({
        "part": part, **facts, "median_ms": medians_ms(times, 4), "gloo_over_farandole": ratio,
        "interval": interval, "ranks": dist.get_world_size(),
    })  # fmt: skip


def training_step(model: nn.Module, loss_of: models.Loss) -> Callable[[], None]:
    """Return a step with an optimizer."""
    return models.step_of(model, loss_of, torch.optim.SGD(model.parameters(), 1e-4))


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
            contenders = {each: calls[each][name] for each in BACKENDS}
            measure("small", {"collective": name, "bytes": byte_count}, contenders, arguments.samples, repeats)


def ddp(groups: Groups, arguments: argparse.Namespace) -> None:
    large = models.large_language_model, models.next_byte_loss(models.random_bytes(2, 128, dist.get_rank()))
    for make, loss_of in (models.build("lm"), large):
        steps, count = {}, 0
        for name, group in groups.items():
            torch.manual_seed(0)
            model = DistributedDataParallel(make(), process_group=group)
            count = sum(parameter.numel() for parameter in model.parameters())
            steps[name] = training_step(model, loss_of)
        measure("ddp", {"model": f"lm, {count / 1e6:.1f} million"}, steps, arguments.samples)


def tensor_parallel(groups: Groups, arguments: argparse.Namespace) -> None:
    tokens = torch.randn(1, models.BLOCK_TOKENS, models.BLOCK_WIDTH, requires_grad=True)
    loss_of = models.mean_square_loss(tokens)
    steps = {
        name: training_step(models.stock_block(group, norms=False), loss_of) for name, group in groups.items()
    }

    def four_sums(group: Any) -> Callable[[], None]:
        message = torch.zeros(1, models.BLOCK_TOKENS, models.BLOCK_WIDTH)

        def run() -> None:
            for _ in range(4):
                dist.all_reduce(message, group=group)

        return run

    sums = {name: four_sums(group) for name, group in groups.items()}
    shape = {"width": models.BLOCK_WIDTH, "tokens": models.BLOCK_TOKENS}
    measure("tensor-parallel", shape, steps, arguments.samples)
    measure("tensor-parallel, its four sums alone", shape, sums, arguments.samples)


def fsdp(groups: Groups, arguments: argparse.Namespace) -> None:
    layers, elements = arguments.layers, int(arguments.million / arguments.layers * 1e6)
    steps = {}
    for name, group in groups.items():
        mesh = DeviceMesh.from_group(group, "cpu")
        seconds = arguments.compute_seconds / layers / 3
        gradient = torch.ones(1).expand(elements)
        model = nn.Sequential(
            *(models.SleepingLayer(torch.ones(elements), gradient, seconds) for _ in range(layers))
        )
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps[name] = training_step(model, models.mean_square_loss(torch.ones(4)))
    facts = {"million parameters": arguments.million, "compute_ms": 1e3 * arguments.compute_seconds}
    if arguments.gigabits:
        facts["wire_bound_ms"] = stage_3_bound_ms(layers * elements, fd.world().node_count, arguments.gigabits)
    measure("fsdp", facts, steps, arguments.samples)


PARTS: dict[str, Callable[[Groups, argparse.Namespace], None]] = {
    "small": small,
    "ddp": ddp,
    "tensor-parallel": tensor_parallel,
    "fsdp": fsdp,
}


def main() -> None:
    parser = make_parser(
        __doc__,
        samples=11,
        only=([str], "of the small collectives"),
        gigabits=(0.0, "a second, of each host's link, for the bound"),
        million=(27.0, "parameters of fsdp's model"),
        layers=(9, "of fsdp's model"),
        compute_seconds=(0.6, "of fsdp's model, a step"),
    )
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
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

"""What a device computes, reads and starts: matrix products by size and precision, copies, small operations."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ...comm.autotune.probe import measure_codecs
from ...comm.device.accelerator import is_accelerator, memory_of, model_of
from ...comm.device.streams import streams_of
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster import CodecCost, Coefficient, ComputeRate, Device
from ...core.host.process_status import machine_name
from ...core.step_model import CANDIDATES, CodecSpeed, slowest_speed
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.spec import DEVICE_BUCKET_BYTES
from ...launch.doctor.facts import read_memory
from ..intervals import median_interval
from .rounds import Case, Samples, affordable, measured, rate_figure, sample, seconds_figure, slowest, timed

# What each codec costs a rank here: the measurement of ``codec = "auto"``, repeated.


def measure_codec_costs(world: World, seconds: float) -> dict[str, CodecCost]:
    """Return the cost of each candidate of the tuner, of the slowest rank while all ranks encode.

    Called by all ranks. On an accelerator seconds of the device, and what a bucket takes beside its bytes.
    """
    runs: dict[str, list[CodecSpeed]] = {name: [] for name in CANDIDATES}

    def measure(name: str, _: int) -> float:
        size = max(2, world.size)  # one rank: as if it had a peer
        runs[name].append(measure_codecs((name,), size, world.device)[name])
        return runs[name][-1].seconds(DEVICE_BUCKET_BYTES)

    sample(world, [Case(name, 1.0, partial(measure, name)) for name in CANDIDATES], seconds)
    costs = {name: [(run.seconds_per_byte, run.seconds_per_bucket) for run in each] for name, each in runs.items()}
    everyone = all_gather_json(world, "measure/codecs", costs)
    is_device = streams_of(world.device) is not None
    found = {}
    for name, (run, *_) in runs.items():
        rounds = zip(*(costs[name] for costs in everyone), strict=True)
        slowest = [slowest_speed(run, round_) for round_ in rounds]
        found[name] = CodecCost(
            _figure([each.seconds_per_byte for each in slowest]), float(f"{run.ratio:.6g}"), run.rounds,
            _figure([each.seconds_per_bucket for each in slowest])
            if is_device and not CodecSpec.parse(name).is_exact else None,
        )  # fmt: skip
    return found


def _figure(samples: Sequence[float]) -> Coefficient:
    return seconds_figure(samples) if any(samples) else measured(0.0, 0.0, 0.0)


_SIDES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (256, 1024, 2048, 4096, 8192)}
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""More than caches hold; on a device enough that the launch does not count."""
_SMALL_OPERATIONS = 100
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_SLOW = 0.9
"""A rank below this share of the median speed, in all of its interval, is named."""


def measure_device(world: World, seconds: float) -> tuple[Device, dict[int, float]]:
    """Return the device of a rank while all ranks compute, and the speeds of ranks that are slower than most.

    Called by all ranks. Rates are those of the slowest rank in each round; of ranks that are slower than the
    others all the time, those of the median rank, and their speed beside it.
    """
    kind = world.device.type
    compute: dict[str, tuple[ComputeRate, ...]] = {}
    speeds: dict[int, float] = {}
    precisions = _PRECISIONS[kind]
    for precision in precisions:
        family = [_product(side, _TYPES[precision], world.device) for side in _SIDES[kind]]
        kept = affordable(world, family, 0.8 * seconds / (len(precisions) + 1))
        found = sample(world, kept, seconds / (len(precisions) + 1))
        if precision == "fp32":
            speeds = slow_ranks(found[-1])
        compute[precision] = tuple(
            ComputeRate(case.work, rate_figure(case.work, _usual(samples, speeds)))
            for case, samples in zip(kept, found, strict=True)
        )
    copy, small = _copy(world.device), _small(world.device)
    fused = {
        name: attention(_TYPES[name], world.device) for name in precisions if kind != "cpu" and name != "fp32"
    }
    copied, started, *attended = (
        _usual(samples, speeds)
        for samples in sample(world, [copy, small, *fused.values()], seconds / (len(precisions) + 1))
    )
    device = Device(
        name=_name(world.device),
        memory_bytes=memory_of_a_rank(world),
        memory_bytes_per_second=rate_figure(copy.work, copied),
        launch_seconds=seconds_figure(started),
        compute=compute,
        shares_core=kind == "cpu" and len(os.sched_getaffinity(0)) <= torch.get_num_threads(),
        attention_flops_per_second={
            name: rate_figure(case.work, times)
            for (name, case), times in zip(fused.items(), attended, strict=True)
        },
    )
    return device, speeds


def slow_ranks(samples: Samples) -> dict[int, float]:
    """Return the speeds of ranks that are slower than the median rank in all of their interval; 1 is its speed."""
    usual = statistics.median([statistics.median(row) for row in samples])
    found = {}
    for rank, times in enumerate(zip(*samples, strict=True)):
        median, (low, _) = median_interval(times)
        if usual / low < _SLOW:
            found[rank] = float(f"{usual / median:.3g}")
    return found


def memory_of_a_rank(world: World) -> Coefficient:
    """Return what a rank may use: of a GPU what it has, of a host its limit, divided by the ranks of the machine.

    Called by all ranks; the smallest of all. The interval is from what is free now to all there is. Emulated hosts
    are one machine: ranks that see the same kernel share its memory.
    """
    memory = memory_of(world.device)
    if memory is not None:
        mine = {"machine": f"{world.host} {world.device}", "free": memory.free, "total": memory.total}
    else:
        facts = read_memory()
        total = facts["memory_bytes"] or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        mine = {
            "machine": machine_name() or world.host,
            "free": facts["memory_available_bytes"] or total,
            "total": total,
        }
    everyone = all_gather_json(world, "measure/memory", mine)
    shares = []
    for each in everyone:
        sharers = sum(other["machine"] == each["machine"] for other in everyone)
        shares.append((int(each["free"]) // sharers, int(each["total"]) // sharers))
    free, total = min(free for free, _ in shares), min(total for _, total in shares)
    return measured(float(free), float(min(free, total)), float(max(free, total)))


def _usual(samples: Samples, slow: dict[int, float]) -> list[float]:
    """Return the slowest rank's time in each round, those left out that are slow all the time."""
    kept = [[value for rank, value in enumerate(row) if rank not in slow] for row in samples]
    return slowest(kept if all(kept) else samples)


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Case:
    left = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
    right = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
    out = torch.empty(side, side, dtype=dtype, device=device)
    return Case(f"{side} x {side}", 2.0 * side**3, timed(lambda: torch.mm(left, right, out=out), device))


def attention(
    dtype: torch.dtype, device: torch.device, *, heads: int = 8, tokens: int = 4096, width: int = 128
) -> Case:
    """Return causal attention in one kernel, forward and backward, as planners count it: half of all scores."""
    queries, keys, values = (
        torch.randn(1, heads, tokens, width, dtype=torch.float32, device=device).to(dtype).requires_grad_()
        for _ in range(3)
    )

    def both() -> None:
        out = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        torch.autograd.grad(out, (queries, keys, values), out)

    products = _FORWARD_PRODUCTS + _BACKWARD_PRODUCTS
    return Case("attention", products * heads * tokens * (tokens + 1.0) * width, timed(both, device))


def _copy(device: torch.device) -> Case:
    nbytes = _COPY_BYTES[device.type]
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return Case("copy", 2.0 * nbytes, timed(lambda: target.copy_(source), device))


def _small(device: torch.device) -> Case:
    """Return an operation on next to nothing, as in a forward pass: autograd records it."""
    weight = torch.ones(4, dtype=torch.float32, device=device, requires_grad=True)
    measure = timed(lambda: weight * 2.0, device)
    return Case("small operation", 1.0, measure, repeats=_SMALL_OPERATIONS)


def _name(device: torch.device) -> str:
    if is_accelerator(device):
        return model_of(device)
    from ..machine import machine_facts

    threads = torch.get_num_threads()
    return f"{machine_facts()['processor']}, {threads} thread{'s' if threads > 1 else ''} a rank"

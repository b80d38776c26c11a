"""Kernels of int8 and int4 on an accelerator: bytes a second beside a plain copy, and a whole exchange by them.

    python benchmarks/device_kernels.py
    python benchmarks/device_kernels.py --elements 1048576 --json

One process plays one rank of several (`--ranks`): what the others send is what it sends itself. A kernel's time is
the median over events of `--repeats` launches, after a warm-up; its bytes are each number read and written once.
The exchange is what a bucket drives: three launches and what Python does between them, or torch's operations.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from farandole.comm.codecs.codec import FeedbackState
from farandole.comm.codecs.device_quantize import device_quantize
from farandole.comm.codecs.quantize import Eager, eager_exchange, piece_elements
from farandole.comm.codecs.registry import require_packer
from farandole.comm.device.accelerator import accelerators, model_of, timing_event
from farandole.comm.messages import GroupRank
from farandole.core.vocabulary.codec_spec import CodecSpec
from shared import make_parser


def main() -> None:
    parser = make_parser(__doc__, elements=128 << 20, ranks=8, repeats=30, json=False)
    options = parser.parse_args()
    kind, _ = accelerators()
    if not kind:
        parser.exit(2, "torch sees no accelerator here\n")
    device = torch.device(kind, 0)
    copy_rate = _copy_rate(device, options)
    result: dict[str, Any] = {"device": model_of(device), "copy_gb_per_second": copy_rate / 1e9}
    result |= {name: _measure(name, device, options, copy_rate) for name in ("int8", "int4")}
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{result['device']}: a copy moves {copy_rate / 1e9:.0f} GB/s; "
        f"{options.elements:,} numbers, {options.ranks} ranks"
    )
    for name in ("int8", "int4"):
        for what, found in result[name].items():
            rate = (
                f"  {found['gb_per_second']:6.0f} GB/s, {found['of_copy']:.2f} of a copy"
                if "of_copy" in found
                else ""
            )
            print(f"{name} {what:16} {found['milliseconds']:8.3f} ms{rate}")


def _measure(name: str, device: torch.device, options: argparse.Namespace, copy_rate: float) -> dict[str, Any]:
    packer = require_packer(CodecSpec.parse(name))
    made = device_quantize(packer)
    assert made is not None
    group = GroupRank(0, options.ranks)
    made.prepare(device, group)
    count = options.elements
    piece = piece_elements(count, made.packer.block, options.ranks)
    unit = torch.randn(count, device=device)
    residual, spare = torch.randn(count, device=device), torch.empty(count, device=device)
    packed = torch.zeros(options.ranks, made.packer.packed_bytes(piece), dtype=torch.uint8, device=device)
    summary, kernels = torch.empty_like(packed[0]), made.kernels
    others = (options.ranks - 1) / options.ranks
    packed_bytes = packed.numel()
    kinds: dict[str, tuple[Callable[[], Any], float]] = {
        "encode": (
            lambda: kernels.encode(unit, residual, spare, packed, own_row=0),
            others * (12 * count + packed_bytes),
        ),
        "add_up": (
            lambda: kernels.add_up(unit, residual, spare, packed, summary, own_row=0),
            12 * count / options.ranks + packed_bytes + summary.numel(),
        ),
        "land": (lambda: kernels.land(unit, packed), packed_bytes + 4 * count),
    }  # fmt: skip
    found = {}
    for what, (launch, moved) in kinds.items():
        seconds = _seconds(launch, device, options.repeats)
        rate = moved / seconds
        found[what] = {"milliseconds": seconds * 1e3, "gb_per_second": rate / 1e9, "of_copy": rate / copy_rate}
    total, moved = sum(each["milliseconds"] for each in found.values()), sum(each for _, each in kinds.values())
    rate = moved / total * 1e3
    found["all three"] = {"milliseconds": total, "gb_per_second": rate / 1e9, "of_copy": rate / copy_rate}
    for what, exchange in (("exchange, kernels", made.exchange), ("exchange, eager", eager_exchange(packer))):
        once = _exchanging(exchange, unit, residual, spare, group)
        found[what] = {"milliseconds": _seconds(once, device, options.repeats) * 1e3}
    return found


def _exchanging(
    exchange: Eager, unit: torch.Tensor, residual: torch.Tensor, spare: torch.Tensor, group: GroupRank
) -> Callable[[], None]:
    def once() -> None:
        rounds = exchange(unit, FeedbackState(residual, spare, None), group)
        pieces = next(rounds).tensor
        summary = rounds.send(pieces).tensor
        try:
            rounds.send(summary.expand(group.size, -1).contiguous())
        except StopIteration:
            return

    return once


def _copy_rate(device: torch.device, options: argparse.Namespace) -> float:
    """Return the bytes a second of a copy, read and written ones together."""
    one = torch.randn(max(options.elements, 64 << 20), device=device)
    other = torch.empty_like(one)
    return 2 * one.nbytes / _seconds(lambda: other.copy_(one), device, options.repeats)


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        begin, end = timing_event(device), timing_event(device)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()

"""`fd.chunked_cross_entropy` beside the plain composition, eager and compiled: one process, forward and backward.

    python benchmarks/cross_entropy.py --json

Medians of the rounds, the contenders in turn, and how far the memory in use rises above what is there before the
call (hidden, weight and the weight's gradient buffer are there): of all allocations that the profiler counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

import farandole as fd
from farandole.comm.device.accelerator import synchronize
from shared import read_options, take_turns, timed


def main() -> None:
    arguments = read_options(
        __doc__,
        classes=32768,
        rows=2048,
        hidden=512,
        chunk_rows=([int], "contenders of so many rows a chunk"),
        rounds=7,
        device="cpu",
        autocast=(str, "run all contenders under autocast", ["bfloat16"]),
        json=(False, "write the results as one JSON object"),
    )
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    hidden = torch.randn(arguments.rows, arguments.hidden, device=device, requires_grad=True)
    weight = (torch.randn(arguments.classes, arguments.hidden, device=device) * 0.02).requires_grad_()
    targets = torch.randint(arguments.classes, (arguments.rows,), device=device)

    def plain() -> torch.Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight), targets)

    def chunked(chunk_rows: int | None) -> Callable[[], torch.Tensor]:
        return lambda: fd.chunked_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows)

    contenders: dict[str, Callable[[], torch.Tensor]] = {"eager": plain, "torch.compile": torch.compile(plain)}
    contenders["chunked"] = chunked(None)
    contenders |= {f"chunked, {rows} rows": chunked(rows) for rows in arguments.chunk_rows or []}

    def step(loss: Callable[[], torch.Tensor]) -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.autocast is not None):
            value = loss()
        value.backward()
        synchronize(device)

    gradients = {}
    for name, loss in contenders.items():
        step(loss)  # compiles, and warms up
        assert weight.grad is not None, "the weight trains"
        gradients[name] = weight.grad
    steps = {
        name: timed(partial(step, loss), before=partial(synchronize, device)) for name, loss in contenders.items()
    }
    seconds = take_turns(steps, arguments.rounds, warm_up=0)
    results = {}
    for name, loss in contenders.items():
        far = float((gradients[name] - gradients["eager"]).abs().max() / gradients["eager"].abs().max())
        results[name] = {
            "median_seconds": round(statistics.median(seconds[name]), 4),
            "least_seconds": round(min(seconds[name]), 4),
            "peak_mib": round(_peak_bytes(partial(step, loss), device) / 2**20, 1),
            "gradient_differs": float(f"{far:.1e}"),
        }
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **results}, indent=2))
        return
    for name, each in results.items():
        print(f"{name:>20}: {each['median_seconds']:.4f} s, peak {each['peak_mib']:.1f} MiB above")


def _peak_bytes(call: Callable[[], None], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


if __name__ == "__main__":
    main()

"""`fd.chunked_cross_entropy` beside the plain composition, eager and compiled: one process, forward and backward.

    python benchmarks/cross_entropy.py --json

Medians of the rounds, the contenders in turn, and how far the memory in use rises above what is there before the
call (hidden, weight and the weight's gradient buffer are there): of all allocations that the profiler counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

import farandole as fd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk-rows", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", choices=["bfloat16"], help="run all contenders under autocast")
    parser.add_argument("--json", action="store_true", help="write the results as one JSON object")
    arguments = parser.parse_args()
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
    contenders |= {f"chunked, {rows} rows": chunked(rows) for rows in arguments.chunk_rows}

    def step(loss: Callable[[], torch.Tensor]) -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.autocast is not None):
            value = loss()
        value.backward()

    gradients = {}
    for name, loss in contenders.items():
        step(loss)  # compiles, and warms up
        assert weight.grad is not None, "the weight trains"
        gradients[name] = weight.grad
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, loss in contenders.items():
            _wait(device)
            begin = time.perf_counter()
            step(loss)
            _wait(device)
            seconds[name].append(time.perf_counter() - begin)
    results = {}
    for name, loss in contenders.items():
        far = float((gradients[name] - gradients["eager"]).abs().max() / gradients["eager"].abs().max())
        results[name] = {
            "median_seconds": round(statistics.median(seconds[name]), 4),
            "least_seconds": round(min(seconds[name]), 4),
            "peak_mib": round(_peak_bytes(lambda loss=loss: step(loss), device) / 2**20, 1),  # type: ignore[misc]
            "gradient_differs": float(f"{far:.1e}"),
        }
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **results}, indent=2))
        return
    for name, each in results.items():
        print(f"{name:>20}: {each['median_seconds']:.4f} s, peak {each['peak_mib']:.1f} MiB above")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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

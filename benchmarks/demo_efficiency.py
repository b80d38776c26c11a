"""Efficiency of the demo's two processes over its one, runs interleaved 1 2 2 1.

    python benchmarks/demo_efficiency.py --pairs 4

One thread a process, each bound to a core; throughput of the steps after warm-up, as in the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def rate(directory: Path, size: int, steps: int, name: str) -> float:
    script = [sys.executable, "-m", "farandole.bench.demo.demo_train", "--steps", str(steps)]
    command = [sys.executable, "-m", "farandole", "run", "-np", str(size), "--json"]
    # One core for the one process too: the same share as each of the two has.
    bound = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if size == 1 else []
    done = subprocess.run(
        [*bound, *command, "--run-dir", str(directory / name), "--", *script],
        check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1])["summary"]["samples_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as directory:
        for pair in range(arguments.pairs):
            for size in (1, 2) if pair % 2 == 0 else (2, 1):
                rates[size].append(rate(Path(directory), size, arguments.steps, f"{pair}-{size}"))
    one, two = statistics.median(rates[1]), statistics.median(rates[2])
    each = [round(b / a / 2, 3) for a, b in zip(rates[1], rates[2], strict=True)]
    print(json.dumps({"samples_per_second": rates, "efficiency": round(two / one / 2, 3), "each_pair": each}))


if __name__ == "__main__":
    main()

"""Efficiency of the demo's two processes over its one, runs interleaved 1 2 2 1.

    python benchmarks/demo_efficiency.py --pairs 4

One thread a process, each bound to a core; throughput of the steps after warm-up, as in the summary.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial

from shared import FARANDOLE, read_options, take_turns


def rate(directory: str, size: int, steps: int) -> float:
    """Return the samples a second of one run."""
    script = [sys.executable, "-m", "farandole.bench.demo_train", "--steps", str(steps)]
    command = [*FARANDOLE, "run", "-np", str(size), "--json"]
    # One core for the one process too: the same share as each of the two has.
    bound = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if size == 1 else []
    done = subprocess.run(
        [*bound, *command, "--run-dir", tempfile.mkdtemp(dir=directory), "--", *script],
        check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1])["summary"]["samples_per_second"])


def main() -> None:
    arguments = read_options(__doc__, pairs=4, steps=40)
    with tempfile.TemporaryDirectory() as directory:
        runs = {size: partial(rate, directory, size, arguments.steps) for size in (1, 2)}
        rates = take_turns(runs, arguments.pairs, warm_up=0)
    one, two = statistics.median(rates[1]), statistics.median(rates[2])
    each = [round(b / a / 2, 3) for a, b in zip(rates[1], rates[2], strict=True)]
    print(json.dumps({"samples_per_second": rates, "efficiency": round(two / one / 2, 3), "each_pair": each}))


if __name__ == "__main__":
    main()

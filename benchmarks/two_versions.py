"""The CPU step of two checkouts of Farandole side by side: blocks of jobs A B B A, medians, and their ratio.

    python benchmarks/two_versions.py /path/of/the/other/checkout --codec none int8

Each job has two ranks on this machine, which train a language model by route flat; the figure of a job is the
median step of the slower rank. The other checkout may be of any version with `fd.distribute`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

STEPS, WARM_UP = 24, 6
_HERE = Path(__file__).resolve()


def _train(codec: str) -> None:
    """One rank of a job."""
    import torch
    from torch import nn

    import farandole as fd
    from farandole.bench.models.language import LanguageModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = fd.init()
    model: nn.Module = LanguageModel(width=256, depth=4, heads=4, context=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer = fd.distribute(model, optimizer, fd.Plan(codec=codec, route="flat"))
    tokens = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(world.rank))
    seconds = []
    for _ in range(STEPS + WARM_UP):
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    print("STEP", json.dumps(statistics.median(seconds[WARM_UP:])), flush=True)
    fd.shutdown()


def _job(source: Path, codec: str) -> float:
    """Return the seconds of a step by the code in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        "-np",
        "2",
        "--",
        sys.executable,
        str(_HERE),
        "--rank",
        codec,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = [float(line.split("STEP ")[1]) for line in done.stdout.splitlines() if "STEP " in line]
    assert len(found) == 2, done.stdout + done.stderr
    return max(found)


def main() -> None:
    """Measure both, and print a line for each codec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--codec", nargs="+", default=["none", "int8"])
    parser.add_argument("--rounds", type=int, default=4, help="blocks of four jobs")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        _train(arguments.rank)
        return
    here = _HERE.parents[1]
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores: this checkout over the other, ms a step")
    for codec in arguments.codec:
        seconds: dict[Path, list[float]] = {here: [], arguments.other: []}
        for _ in range(arguments.rounds):
            for source in (here, arguments.other, arguments.other, here):
                seconds[source].append(_job(source, codec))
        ours, theirs = (statistics.median(seconds[each]) for each in (here, arguments.other))
        pairs = [a / b for a, b in zip(seconds[here], seconds[arguments.other], strict=True)]
        print(f"{codec}: {1e3 * ours:.1f} and {1e3 * theirs:.1f}, ratio {ours / theirs:.3f} "
              f"(neighbours {min(pairs):.3f} to {max(pairs):.3f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

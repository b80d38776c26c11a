"""What `offload = "disk"` costs: seconds of an optimizer's step and resident memory, beside states in memory.

    python benchmarks/states_on_disk.py --json [--directory DIR] [--limit-mib N]

One process for each contender, Adam, one backward pass, then only steps. With --limit-mib the process runs in a
memory cgroup with this limit (version 1 or 2; needs root), in which page cache counts too: what a rank needs when
there is no memory to spare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import farandole as fd
from shared import make_parser, peak_bytes_from_now, seconds_of

WIDTH = 1024


def main() -> None:
    parser = make_parser(
        __doc__,
        directory=("", "of the files; by default the plan's"),
        layers=(64, f"linear layers of {WIDTH} x {WIDTH}, 4 MiB each"),
        steps=8,
        limit_mib=([int], "run with states on disk under these limits, too"),
        json=(False, "write the results as one JSON object"),
    )
    parser.add_argument("--measure", choices=["memory", "disk"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(_measure(arguments)))
        return
    results = {}
    runs = [("memory", None), ("disk", None), *(("disk", limit) for limit in arguments.limit_mib or [])]
    for kind, limit in runs:
        name = kind if limit is None else f"{kind}, limit {limit} MiB"
        words = [sys.executable, __file__, "--measure", kind, *(x for x in sys.argv[1:] if x != "--json")]
        group = None if limit is None else _group(limit)
        done = subprocess.run(
            words, capture_output=True, text=True, check=False,
            preexec_fn=None if group is None else lambda group=group: _enter(group),
        )  # fmt: skip
        results[name] = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr[-400:]}
        if group is not None:
            group.rmdir()
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "states_mib": 8 * arguments.layers, **results}, indent=2))
        return
    for name, each in results.items():
        print(f"{name}: {each}")


def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    fd.init(progress=False)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(arguments.layers)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, foreach=True)
    plan = fd.Plan()
    if arguments.measure == "disk":
        plan = fd.Plan(offload="disk", offload_directory=arguments.directory)
    fd.distribute(model, optimizer, plan)
    model(torch.randn(2, WIDTH)).square().mean().backward()
    peak_bytes = peak_bytes_from_now()
    optimizer.step()
    seconds = seconds_of(optimizer.step, arguments.steps)
    return {
        "median_step_seconds": round(statistics.median(seconds), 4),
        "longest_step_seconds": round(max(seconds), 4),
        "peak_above_gradients_mib": round(peak_bytes() / 2**20, 1),
    }


def _group(limit_mib: int) -> Path:
    root = Path("/sys/fs/cgroup")
    group = (root / "memory" if (root / "memory").is_dir() else root) / f"states-on-disk-{os.getpid()}"
    group.mkdir()
    file = group / "memory.limit_in_bytes"
    (file if file.exists() else group / "memory.max").write_text(str(limit_mib * 2**20))
    return group


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()

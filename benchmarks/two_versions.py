"""Step time of this working tree beside another commit, in turns, to see whether a change costs anything.

    python benchmarks/two_versions.py 5fa3307 --codec none --model small

Each version has two ranks of its own, on the same two cores, which wait while those of the other version train
(blocks A B B A). A step's time is that of its slowest rank. Printed are medians, and the ratio of this
tree to the commit, of neighbours in time, with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
MODELS = ("small", "lm")


class Version:
    """Ranks that train with the sources in `tree`, a block of steps for each call of `train`."""

    def __init__(self, tree: Path, arguments: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, __file__, "--play", "--model", arguments.model, "--codec", arguments.codec]
        shared = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        shared |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
        }
        self.ranks = [
            subprocess.Popen(
                [*command, str(arguments.steps)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def train(self) -> list[float]:
        """Return the seconds of each step of one block, on the slowest rank."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        times: list[list[float]] = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise SystemExit(f"a rank of {rank.args!r} ended: see above")
            times.append(json.loads(line))
        return [max(step) for step in zip(*times, strict=True)]

    def end(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


def play(arguments: argparse.Namespace) -> None:
    """Be one rank: train a block of steps for each line that comes, and answer with their seconds."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    import torch
    import torch.distributed as dist

    import farandole as fd
    from models import build

    fd.init(progress=False)
    make, loss_of = build(arguments.model)
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    fd.distribute(model, optimizer, fd.Plan(codec=arguments.codec))
    for _ in sys.stdin:
        seconds = []
        for _ in range(arguments.steps):
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), flush=True)


def compare(arguments: argparse.Namespace) -> dict[str, object]:
    """Return what was measured of this tree and of the commit."""
    from shared import paired  # ranks of the other version cannot: it needs this one's product

    with tempfile.TemporaryDirectory() as directory:
        other = Path(directory, "other")
        add = ["git", "worktree", "add", "--quiet", "--detach", str(other), arguments.commit]
        subprocess.run(add, cwd=ROOT, check=True)
        versions: dict[str, Version] = {}
        try:
            versions = {"this": Version(ROOT, arguments), "other": Version(other, arguments)}
            times: dict[str, list[float]] = {name: [] for name in versions}
            for version in versions.values():
                version.train()  # warm-up
            for number in range(arguments.rounds):
                for name in versions if number % 2 else reversed(versions):
                    times[name] += versions[name].train()
        finally:
            for version in versions.values():
                version.end()
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    ratio, interval = paired(times["this"], times["other"])
    medians = {name: round(1e3 * sorted(each)[len(each) // 2], 3) for name, each in times.items()}
    return {
        "model": arguments.model,
        "codec": arguments.codec,
        "steps": len(times["this"]),
        "median_ms": medians,
        f"this_over_{arguments.commit}": ratio,
        "interval": interval,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of this repository")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps a block")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        arguments.steps = int(arguments.commit)
        play(arguments)
    else:
        print(json.dumps(compare(arguments)))


if __name__ == "__main__":
    main()

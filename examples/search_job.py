"""One trial of a search for batch size and learning rate: a job of some seconds, and who starts it.

    farandole run -np 2 -- python search_job.py --batch-size 32 --lr 0.3 --seconds 2

optuna_search.py and ray_tune_search.py start it by `held_out_losses`. What is compared is the held-out loss after
the same time, not after the same number of samples or steps: a larger batch makes fewer steps of more samples.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPORTS = 4
"""Held-out losses of a trial, at equal parts of its time."""


def held_out_losses(
    batch_size: int, lr: float, directory: Path, *, ranks: int = 2, seconds: float = 2.0
) -> Iterator[float]:
    """Start a job, and yield its held-out losses as they come; the job ends when the caller stops asking.

    `directory` becomes its run directory. Raises RuntimeError if the job fails.
    """
    directory.mkdir(parents=True)
    reports = directory / "reports.jsonl"
    # Linux ends the job when the search is killed.
    command = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    command += [sys.executable, "-m", "farandole", "run", "-np", str(ranks), "--run-dir", str(directory), "--"]
    command += [sys.executable, __file__, "--batch-size", str(batch_size), "--lr", str(lr)]
    command += ["--seconds", str(seconds), "--reports", str(reports)]
    with (directory / "output.txt").open("w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            seen = 0
            while seen < REPORTS:
                ended = job.poll() is not None
                lines = reports.read_text().splitlines() if reports.exists() else []
                for line in lines[seen:]:
                    yield float(json.loads(line)["loss"])
                seen = max(seen, len(lines))
                if ended and seen < REPORTS:
                    raise RuntimeError(f"the job ended with {job.returncode}: see {directory}/output.txt")
                time.sleep(0.05)
            job.wait()
        finally:
            if job.poll() is None:
                job.terminate()  # the launcher ends its ranks
                job.wait()


def train() -> None:
    """Train for some seconds on the bytes of Python's standard library, and write held-out losses."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import farandole as fd
    from farandole.bench.data import load_text

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="windows of 32 bytes a rank in a step")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--reports", type=Path, default=Path(os.devnull))
    arguments = parser.parse_args()

    world = fd.init(progress=False)
    torch.manual_seed(0)
    training, held_out = load_text(context=32, limit_bytes=400_000)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    model, optimizer = fd.distribute(model, optimizer)
    noise = fd.noise_scale(model, every=2)
    loader = fd.shard(DataLoader(training, batch_size=arguments.batch_size, shuffle=True))
    evaluation = fd.shard(DataLoader(held_out, batch_size=512), evaluate=True)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate() -> float:
        total = count = 0.0
        with torch.no_grad():
            for inputs, targets in evaluation:
                total += float(loss_of(inputs, targets)) * len(inputs)
                count += len(inputs)
        return fd.mean(total / max(count, 1.0), samples=int(count))

    def report(loss: float) -> None:
        if world.rank == 0:
            print(f"held-out loss {loss:.4f}", flush=True)
            with arguments.reports.open("a") as file:
                file.write(json.dumps({"loss": loss if math.isfinite(loss) else 1e9}) + "\n")

    reports, step, spent, begin = 0, 0, 0.0, time.monotonic()
    while reports < REPORTS:
        for inputs, targets in loader:
            loss = loss_of(inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 5 == 0:
                elapsed = fd.mean(spent + time.monotonic() - begin)  # the same on all ranks
                while reports < REPORTS and elapsed >= arguments.seconds * (reports + 1) / REPORTS:
                    spent += time.monotonic() - begin  # what an evaluation takes is not counted
                    report(evaluate())
                    reports, begin = reports + 1, time.monotonic()
                if reports == REPORTS:
                    break
    if world.rank == 0:
        print(noise)


if __name__ == "__main__":
    train()

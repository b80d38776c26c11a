"""What shares by speed gain where ranks are unequal, and cost where they are equal.

python benchmarks/balance.py gain [--speeds 1,1,1,0.5] [--batch 64] [--sample-ms 6]
python benchmarks/balance.py cost [--ranks 2] [--rounds 5] [--step-ms 40]

`gain`: ranks that sleep for each sample, so that they run honestly on fewer cores than ranks; the median step of
the last 20, with equal shares and with `balance = "speed"`, beside the integer optimum, and the first step from
which on the median of 10 is within 5 % of that. `cost`: equal ranks that sleep for `--step-ms` a step,
trained in turns with and without `balance = "speed"`; the medians of the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.core.step_model import divide_samples, longest_seconds
from shared import is_main, make_parser, run_on_ranks, take_turns

STEPS = 80


class Sleeper(nn.Module):
    """A small model that takes `seconds` for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, 16) to (batch, 16)."""
        time.sleep(self.seconds * len(x))
        result: torch.Tensor = self.layer(x)
        return result


def train(balance: str, seconds: float, batch: int, steps: int) -> list[float]:
    """Train, and return how long each step took."""
    fd.init(progress=False)
    model = Sleeper(seconds)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    fd.distribute(model, optimizer, fd.Plan(balance=balance))
    rows = TensorDataset(torch.randn(batch * steps, 16, generator=torch.Generator().manual_seed(0)))
    ends = [time.monotonic()]
    for (x,) in fd.shard(DataLoader(rows, batch_size=batch), split=True):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
    fd.shutdown()
    return [end - begin for begin, end in pairwise(ends)]


def gain(arguments: argparse.Namespace) -> None:
    """Compare with equal shares and the optimum; rank 0 prints."""
    speeds = tuple(float(each) * 1e3 / arguments.sample_ms for each in arguments.speeds.split(","))
    rank = int(os.environ["FARANDOLE_RANK"])
    equal = statistics.median(train("none", 1 / speeds[rank], arguments.batch, 25)[-20:])
    steps = train("speed", 1 / speeds[rank], arguments.batch, STEPS)
    balanced = statistics.median(steps[-20:])
    counts = divide_samples(arguments.batch, speeds)
    optimum = longest_seconds(counts, speeds)
    medians = [statistics.median(steps[i : i + 10]) for i in range(STEPS - 10)]
    since = next((str(i + 1) for i, each in enumerate(medians) if each <= 1.05 * optimum), "none")
    if is_main():
        print(f"speeds {arguments.speeds}, batch {arguments.batch}, optimum {' '.join(map(str, counts))}")
        print(f"equal {equal * 1e3:.1f} ms, speed {balanced * 1e3:.1f} ms, optimum {optimum * 1e3:.1f} ms")
        print(f"{balanced / optimum:.3f} of the optimum, {equal / balanced:.2f} times as fast as equal shares")
        print(f"within 5 % from step {since} on")


def cost(arguments: argparse.Namespace) -> None:
    """Compare equal ranks with and without; rank 0 prints."""

    def median_step(balance: str) -> float:
        return statistics.median(train(balance, arguments.step_ms / 8e3, 8 * arguments.ranks, 60)[10:])

    kinds = {balance: partial(median_step, balance) for balance in ("none", "speed")}
    medians = take_turns(kinds, arguments.rounds, warm_up=0)
    if is_main():
        without, with_balance = (statistics.median(found) for found in medians.values())
        ratios = sorted(b / a for a, b in zip(*medians.values(), strict=True))
        print(f"{arguments.ranks} equal ranks, {arguments.rounds} rounds of 60 steps, medians of steps 11 to 60")
        print(f"none {without * 1e3:.3f} ms, speed {with_balance * 1e3:.3f} ms: {with_balance / without - 1:+.2%}")
        print(f"rounds {', '.join(f'{each - 1:+.2%}' for each in ratios)}")


def main() -> None:
    """Start the ranks, or be one."""
    parser = make_parser(__doc__, speeds="1,1,1,0.5", batch=64, sample_ms=6.0, ranks=2, rounds=5, step_ms=40.0)
    parser.add_argument("what", choices=["gain", "cost"])
    arguments = parser.parse_args()
    run_on_ranks(arguments.ranks if arguments.what == "cost" else len(arguments.speeds.split(",")))
    (gain if arguments.what == "gain" else cost)(arguments)


if __name__ == "__main__":
    main()

"""Time to an equal validation loss on a slow link: stock DDP, DDP with torch's PowerSGD hook, and our codecs.

    python benchmarks/time_to_loss.py --rate 100mbit --seeds 3 --steps 600 --output time_to_loss.json
    python benchmarks/time_to_loss.py --rate 100mbit --seeds 5 --steps 600 --split

Two emulated hosts train a language model on the text that is on every machine. For each seed the goal is the
validation loss that DDP has after ``--steps`` steps; validation is not in the times. Each contender reaches it at
its first validation at or below it, or does not within ``--most`` times as many steps.

Plain (mode "real"): every run trains on the shaped link, and its clock is what counts. ``--split`` (mode "split"):
step times are measured on the shaped link, all contenders interleaved, and the runs train on a link that is not
shaped; a time is steps to the goal times the median step. There "auto" trains by what it chose on the shaped link,
from the first step on. The result says which mode it is of. A contender whose ranks train on their own between
meetings (``int4+sync=diloco:H=30``) is timed in blocks from meeting to meeting, and validated with the averaged
parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import date
from pathlib import Path

from farandole.bench.intervals import median_interval
from farandole.bench.launch_ranks import Hosts
from farandole.core.vocabulary.errors import FarandoleError
from farandole.core.vocabulary.units import parse_bits_per_second
from shared import Run, read_options, run_workers, say

WORKER = "time_to_loss_ranks"
DDP, COMPUTE = "ddp", "ddp-nosync"
CONTENDERS = [
    *(f"ddp-powersgd:{rank}" for rank in (1, 2, 4)),
    "powersgd:4",
    "int4",
    "auto+lossy=true",
]


class Benchmark:
    """What all runs have in common."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.shaped = Hosts(2, 1, parse_bits_per_second(arguments.rate))
        self.trains_on = Hosts(1, 2, None) if arguments.split else self.shaped
        self._model = ["--width", str(arguments.width), "--depth", str(arguments.depth)]
        self._model += ["--batch", str(arguments.batch)]

    def time_steps(self, names: list[str]) -> Run:
        """Return step times on the shaped link, interleaved, by contender."""
        words = ["time", "--contenders", ";".join(names), "--rounds", str(self._arguments.rounds), *self._model]
        return run_workers(self.shaped, WORKER, words)

    def train(self, name: str, seed: int, *, goal: float | None, choice: Run | None) -> Run:
        """Return one run. Without a goal it makes `steps` steps; with one, at least these."""
        words = ["train", "--contenders", name, "--seed", str(seed), "--steps", str(self._arguments.steps)]
        words += ["--every", str(self._arguments.every), *self._model]
        if goal is not None:
            words += ["--goal", repr(goal), "--most", str(self._arguments.most)]
        if choice is not None:
            words += ["--choice", json.dumps(choice)]
        say(f"seed {seed}: {name}")
        return run_workers(self.trains_on, WORKER, words)


def reached(run: Run, goal: float) -> tuple[int, float] | None:
    """Return steps and seconds until the first validation at or below `goal`; None: never."""
    found = (each for each in run["validations"] if each["loss"] <= goal)
    first = next(found, None)
    return None if first is None else (first["step"], first["seconds"])


def loss_after(run: Run, steps: int) -> float:
    """Return the last validation loss of the first `steps` steps."""
    return float([each["loss"] for each in run["validations"] if each["step"] <= steps][-1])


def row_of(runs: list[Run], goals: list[float], steps: int, step_seconds: float | None) -> Run:
    """Return what one contender did, by seed."""
    found = [reached(run, goal) for run, goal in zip(runs, goals, strict=True)]
    losses = [loss_after(run, steps) for run in runs]
    return {
        "seconds_to_loss": [
            each and (each[1] if step_seconds is None else each[0] * step_seconds) for each in found
        ],
        "steps_to_loss": [each and each[0] for each in found],
        "step_seconds": [run["step_seconds"] if step_seconds is None else step_seconds for run in runs],
        "final_losses": losses,
        "final_loss_mean": statistics.mean(losses),
        "final_loss_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
    }


def add_ratios(rows: dict[str, Run]) -> None:
    """Add how many times sooner than DDP each reached the goal, by seed, with its median and interval."""
    for row in rows.values():
        pairs = zip(rows[DDP]["seconds_to_loss"], row["seconds_to_loss"], strict=True)
        row["times_sooner"] = [None if ours is None else theirs / ours for theirs, ours in pairs]
        known = [ratio for ratio in row["times_sooner"] if ratio is not None]
        row["times_sooner_median"], row["times_sooner_interval"] = (
            median_interval(known) if known else (None, None)
        )


def main() -> None:
    arguments = read_options(
        __doc__,
        rate=("100mbit", "of each host's link (default: 100mbit)"),
        seeds=(3, "how many (default: 3)"),
        steps=(600, "of DDP, whose loss is the goal (default: 600)"),
        every=(20, "steps between two validations (default: 20)"),
        most=(2.0, "give up after this many times --steps"),
        rounds=(10, "steps that are timed of each (default: 10)"),
        batch=(4, "windows of 64 bytes a rank (default: 4)"),
        width=256,
        depth=4,
        contenders=(";".join(CONTENDERS), f"beside {DDP}"),
        split=(False, "losses on a free link, step times on the shaped one"),
        output=(Path, "file for the result, kept up to date after each run; also on stdout"),
    )
    others = arguments.contenders.split(";")
    names = [DDP, *others]
    bench = Benchmark(arguments)
    timed = bench.time_steps([COMPUTE, *names] if arguments.split else [COMPUTE, DDP])
    medians = {name: statistics.median(seconds) for name, seconds in timed["seconds"].items()}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    goals: list[float] = []
    result: Run = {}
    for seed in range(arguments.seeds):
        first = bench.train(DDP, seed, goal=None, choice=None)
        goals.append(loss_after(first, arguments.steps))
        runs[DDP].append(first)
        turn = seed % len(others)  # nobody always trains at the same time of the day
        for name in others[turn:] + others[:turn]:
            choice = timed["choices"].get(name) if arguments.split else None
            runs[name].append(bench.train(name, seed, goal=goals[-1], choice=choice))
        rows = {
            name: row_of(runs[name], goals, arguments.steps, medians[name] if arguments.split else None)
            for name in names
        }
        add_ratios(rows)
        result = {
            "date": date.today().isoformat(),
            "mode": "split" if arguments.split else "real",
            "rate": arguments.rate,
            "hosts": 2,
            "parameters": timed["parameters"],
            "batch": arguments.batch,
            "steps": arguments.steps,
            "validated_every": arguments.every,
            "seeds": seed + 1,
            "goals": goals,
            "compute_seconds": medians[COMPUTE],
            "ddp_over_compute": medians[DDP] / medians[COMPUTE],
            "chosen": timed["choices"],
            "timed_step_seconds": timed["seconds"],
            "contenders": rows,
        }
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    try:
        main()
    except FarandoleError as problem:
        sys.exit(f"time_to_loss: {problem}")

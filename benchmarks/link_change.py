"""Codec "auto" beside fixed codecs while the link changes: 1000, 100 and again 1000 Mbit/s during one run.

    python benchmarks/link_change.py --rates 1gbit,100mbit,1gbit --phase 60s --output link_change.json

Two emulated hosts train a small language model, one contender after the other, `--repeats` times in turn. All
links change their rate while they train. For each phase: the median step without the first ones after the change
(`--settle`), these beside it, and auto's share: the fastest fixed choice's median over auto's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from farandole.bench.launch_ranks import Hosts
from farandole.core.vocabulary.errors import FarandoleError
from farandole.core.vocabulary.units import parse_bits_per_second, parse_seconds
from farandole.launch.namespaces import LinkChange, Network
from shared import read_options, run_workers, say, take_turns

AUTO = "auto+lossy=true"
FIXED = ["none", "bf16", "int8", "int4", "powersgd:4"]
START_SECONDS = 15.0
"""For the ranks to start, to make the model and to find each other."""
ASKED_SHARE = 0.9


@dataclass(frozen=True)
class NotedChange(LinkChange):
    """A change that notes when it was made, in seconds of `time.monotonic`."""

    made: tuple[list[float], ...] = ()

    def apply(self, network: Network) -> None:
        """See `LinkChange`."""
        super().apply(network)
        for moments in self.made:
            moments.append(time.monotonic())


def run(name: str, rates: list[float], phase_seconds: float, words: list[str]) -> list[list[float]]:
    """Return the seconds of one run's steps, by phase. A step belongs to the phase in which it began."""
    moments: list[float] = []
    changes = [
        NotedChange(START_SECONDS + phase_seconds * (i + 1), "rate", None, rate, (moments,))
        for i, rate in enumerate(rates[1:])
    ]
    until = time.monotonic() + START_SECONDS + phase_seconds * len(rates)
    say(f"{name}, about {START_SECONDS + phase_seconds * len(rates):.0f} s")
    arguments = ["--contender", name, "--until", repr(until), *words]
    found = run_workers(Hosts(2, 1, rates[0]), "link_change_ranks", arguments, changes=changes)
    steps: list[list[float]] = [[] for _ in rates]
    for begin, seconds in zip(found["begins"], found["seconds"], strict=True):
        steps[sum(moment <= begin for moment in moments)].append(seconds)
    return steps


def describe(phase: list[list[float]], settle: int) -> dict[str, Any]:
    """Return what a contender's steps were in one phase, given for each repeat."""
    settled = [seconds for steps in phase for seconds in steps[settle:]]
    return {
        "median_seconds": statistics.median(settled) if settled else None,
        "steps": len(settled),
        "first_seconds": [[round(seconds, 4) for seconds in steps[:settle]] for steps in phase],
    }


def compare(phases: dict[str, list[dict[str, Any]]], number: int) -> dict[str, Any]:
    """Return auto's share in one phase."""
    medians = {name: rows[number]["median_seconds"] for name, rows in phases.items()}
    fixed = {name: median for name, median in medians.items() if name != AUTO and median is not None}
    if medians.get(AUTO) is None or not fixed:
        return {"best_fixed": None, "share": None, "is_enough": None}
    best = min(fixed, key=lambda name: fixed[name])
    share = fixed[best] / medians[AUTO]
    return {"best_fixed": best, "share": share, "is_enough": share >= ASKED_SHARE}


def settled_after(steps: list[float], best_seconds: float) -> float | None:
    """Return after how many seconds three steps in a row first came near the best fixed choice; None: never."""
    passed = 0.0
    for i, seconds in enumerate(steps):
        if len(steps[i : i + 3]) == 3 and max(steps[i : i + 3]) <= best_seconds / ASKED_SHARE:
            return passed
        passed += seconds
    return None


def main() -> None:
    arguments = read_options(
        __doc__,
        rates=("1gbit,100mbit,1gbit", "one a phase"),
        phase=("60s", "how long each rate lasts (default: 60s)"),
        settle=(10, "steps after a change that are told apart"),
        repeats=1,
        contenders=";".join([AUTO, *FIXED]),
        width=256,
        depth=4,
        batch=4,
        output=(Path, "file for the result, beside stdout"),
    )
    rates = [parse_bits_per_second(text) for text in arguments.rates.split(",")]
    words = [f"--{key}={getattr(arguments, key)}" for key in ("width", "depth", "batch")]
    seconds = parse_seconds(arguments.phase)
    runs = take_turns(
        {name: partial(run, name, rates, seconds, words) for name in arguments.contenders.split(";")},
        arguments.repeats,
        warm_up=0,
    )
    numbers = range(len(rates))
    phases = {
        name: [describe([steps[i] for steps in repeats], arguments.settle) for i in numbers]
        for name, repeats in runs.items()
    }
    verdicts = [compare(phases, i) for i in numbers]
    for i, verdict in enumerate(verdicts):
        if verdict["best_fixed"] is not None:
            best = phases[verdict["best_fixed"]][i]["median_seconds"]
            verdict["auto_settled_after_seconds"] = [settled_after(steps[i], best) for steps in runs[AUTO]]
    result = {
        "date": date.today().isoformat(),
        "rates": arguments.rates.split(","),
        "phase": arguments.phase,
        "steps_told_apart": arguments.settle,
        "batch": arguments.batch,
        "asked_share": ASKED_SHARE,
        "phases": verdicts,
        "contenders": phases,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    try:
        main()
    except FarandoleError as problem:
        sys.exit(f"link_change: {problem}")

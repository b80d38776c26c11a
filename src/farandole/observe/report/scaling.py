"""Speedup and efficiency with other numbers of processes, Amdahl's law fitted to them, what more would give."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.vocabulary.errors import FarandoleError
from ...core.vocabulary.run_files import RUN, SUMMARY
from ..figures.figures import amdahl, fit_amdahl
from ..figures.summary import describe_efficiency
from ..records.run_reader import read_facts
from .charts import Axes, Line, line_chart
from .content import Block, Chart, Code, Run, Section, Table, Text, number, percent

AHEAD = 8
"""The curve goes on to so many times the processes."""
MOST_RUNS = 200
FASTER = 1.1
"""Times the number of processes: a larger speedup is no matter of sharing the work out."""


@dataclass(frozen=True)
class Measured:
    """A run of this command."""

    processes: int
    samples_per_second: float
    name: str


def make(run: Run) -> Section | None:
    """Return the scaling; without a run of one process, how to get one."""
    if run.summary.size < 2 or run.summary.samples_per_second is None:
        return None
    gain = run.summary.comparison
    if gain is None:
        return _how_to(run)
    single = gain.samples_per_second
    runs = {1: Measured(1, single, Path(gain.baseline).name)}
    for measured in siblings(run):
        runs.setdefault(measured.processes, measured)
    size = run.summary.size
    runs[size] = Measured(size, run.summary.samples_per_second, run.directory.name)
    sizes = sorted(runs)
    speedups = [runs[n].samples_per_second / single for n in sizes]
    faster = [n for n, s in zip(sizes, speedups, strict=True) if n > 1 and s > FASTER * n]
    share = math.nan if faster else fit_amdahl(sizes, speedups)
    blocks: list[Block] = []
    if math.isfinite(share):
        blocks.append(_chart(sizes, speedups, share))
    rows = [
        [str(n), runs[n].name, number(runs[n].samples_per_second), f"{s:.2f}x", f"{s / n:.2f}"]
        for n, s in zip(sizes, speedups, strict=True)
    ]
    ahead = [size * 2**k for k in (1, 2, 3)]
    if math.isfinite(share):
        for n in ahead:
            fitted = amdahl(share, n)
            rows.append([str(n), "predicted", number(fitted * single), f"{fitted:.2f}x", f"{fitted / n:.2f}"])
    least = " Ranks are missing: the speedup is at least this." if run.missing_ranks else ""
    points = len([n for n in sizes if n > 1])
    note = (
        f"Predicted by Amdahl's law with {percent(share)} of the work parallel, fitted to {points} "
        f"measured speedup{'s' * (points != 1)}. It takes the network's share as it is here; beyond a host or a "
        f"switch it may be worse."
    )
    if faster:
        note = (
            f"{faster[0]} processes are more than {faster[0]} times as fast as one: the runs differ in more than "
            "their size (load of the machine, threads, another command), so nothing is predicted from them."
        )
    blocks.append(Table(["processes", "run", "samples/s", "speedup", "efficiency"], rows, texts=2, note=note))
    lead = f"{gain.speedup:.2f}x one process, {describe_efficiency(gain.efficiency)}.{least}"
    if math.isfinite(share) and share < 1:
        lead += f" At {percent(share)} parallel, no number of processes gives more than {1 / (1 - share):.1f}x."
    return Section("scaling", "Scaling", blocks, lead)


def _chart(sizes: Sequence[int], speedups: Sequence[float], share: float) -> Chart:
    last = max(sizes) * AHEAD
    at = [1 + (last - 1) * i / 80 for i in range(81)]
    curve = [(n, amdahl(share, n)) for n in at]
    top = max(*speedups, amdahl(share, last)) * 1.25
    ideal = [(n, n) for n in at if n <= top]
    svg = line_chart(
        [
            Line("perfect", ideal if len(ideal) > 1 else [], "other"),
            Line("predicted", curve, "predicted"),
            Line("measured", [(float(n), s) for n, s in zip(sizes, speedups, strict=True)], "mine", dots=True),
        ],
        Axes("processes", "speedup"),
    )
    legend = [("mine", "measured"), ("predicted", "predicted (Amdahl)"), ("other", "perfect")]
    return Chart("Speedup", svg, legend)


def siblings(run: Run) -> list[Measured]:
    """Return the finished runs of the same command beside this one, the newest of each number of processes."""
    command = run.facts.get("command")
    if not command:
        return []
    own = run.directory.resolve()
    found: list[tuple[str, Measured]] = []
    for path in sorted(own.parent.glob(f"*/{RUN}"))[:MOST_RUNS]:
        facts = read_facts(path.parent)
        if path.parent == own or facts.get("command") != command:
            continue
        try:
            summary = json.loads((path.parent / SUMMARY).read_text(encoding="utf-8"))
            rate, size = summary["samples_per_second"], summary["size"]
        except (OSError, ValueError, KeyError, TypeError, FarandoleError):
            continue
        if isinstance(rate, (int, float)) and rate > 0 and type(size) is int and size > 0:
            found.append((str(facts.get("started", "")), Measured(size, float(rate), path.parent.name)))
    return [measured for _, measured in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _how_to(run: Run) -> Section:
    command = run.facts.get("command")
    words = [str(word) for word in command] if isinstance(command, list) and command else ["python", "train.py"]
    blocks: list[Block] = [
        Text("Run the same command as one process; reports of runs beside it then show speedup and efficiency:"),
        Code(f"farandole run -np 1 -- {shlex.join(words)}"),
    ]
    return Section("scaling", "Scaling", blocks, "Unknown: there is no run of one process to compare with.")

"""What the two scores of the diagnosis share: options, runs that are diagnosed, kept rows, and the tables."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from shared import FARANDOLE, NEXT_HEADING, Run, make_parser, markdown, write_figures

ENOUGH, NEAR = 0.8, 0.15
"""Of what a fix promises, and between a cost and the truth."""
LITTLE = 0.10
"""Of a healthy run's step; a finding that costs less is none too many."""
_LONGEST_SECONDS = 300


def read_arguments(about: str, *, repeat: int) -> argparse.Namespace:
    """Return the options; `repeat` is the default."""
    return make_parser(
        about,
        only=(str, "cases whose name contains this text"),
        repeat=(repeat, "runs of each kind, in turn (default: %(default)s)"),
        rows=(Path, "file of rows; cases that it has are not run again"),
        page=(Path, "Markdown to write"),
        keep=(Path, "directory that gets every run"),
    ).parse_args()


def diagnosed(command: Sequence[str], where: Path, environment: Mapping[str, str]) -> tuple[Path, Run]:
    """Run a command in the directory `where`; return the run's directory, and what `farandole diagnose` says."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _LONGEST_SECONDS}
    options |= {"env": environment, "cwd": where}
    done = subprocess.run(command, check=False, **options)
    runs = sorted((where / "runs").iterdir()) if (where / "runs").exists() else []
    if done.returncode or len(runs) != 1:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    said = subprocess.run([*FARANDOLE, "diagnose", str(runs[0]), "--json"], check=True, **options)
    return runs[0], json.loads(said.stdout)


def play(
    names: Sequence[str], judge: Callable[[str], Run], arguments: argparse.Namespace
) -> tuple[list[Run], int]:
    """Judge the cases that are asked for; return the rows in the order of `names`, and 1 if a case failed."""
    kept: Path | None = arguments.rows
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    known, failed = {row["case"] for row in rows}, 0
    for name in names:
        if name in known or (arguments.only and arguments.only not in name):
            continue
        try:
            row = judge(name)
        except (RuntimeError, ValueError, subprocess.SubprocessError) as problem:
            print(f"{name}: {problem}", file=sys.stderr, flush=True)
            failed = 1
            continue
        rows.append(row)
        print(json.dumps(row), flush=True)
        if kept:
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return sorted((row for row in rows if row["case"] in names), key=lambda row: names.index(row["case"])), failed


def is_right(first: Run | None, kinds: Sequence[str], ranks: tuple[int, ...]) -> bool:
    """Return whether the costliest finding is of one of these kinds, and names the ranks if they are known."""
    return first is not None and first["kind"] in kinds and (not ranks or tuple(first["ranks"]) == ranks)


def summarise(rows: Sequence[Run], titles: Mapping[str, str]) -> str:
    """Return how many rows are good, of those that have a figure, under a title by figure."""
    good: dict[str, Callable[[float], bool]] = {
        "right": bool,
        "price": lambda price: abs(price - 1) <= NEAR,
        "kept": lambda share: share >= ENOUGH,
        "by_hand": lambda share: share >= ENOUGH,
    }
    found = {key: [good[key](row[key]) for row in rows if row.get(key) is not None] for key in titles}
    lines = [[title, f"{sum(found[key])} of {len(found[key])}"] for key, title in titles.items()]
    return markdown("asked | measured", lines)


def table(rows: Sequence[Run], fix_title: str, fix_of: Callable[[Run], str]) -> str:
    """Return a line for each case, with milliseconds of a step."""
    lines = []
    for row in rows:
        healthy, faulty, cost, truth, promised, gained = (
            "" if row.get(key) is None else f"{1000 * row[key]:.1f}"
            for key in ("healthy", "faulty", "cost", "truth", "promised", "gained")
        )
        kind = f"{row['kind'] or 'nothing'}{'' if row['right'] else ' **wrong**'}"
        lines.append([row["case"], kind, healthy, faulty, cost, truth, fix_of(row), promised, gained])
    return markdown(f"case | found | healthy | faulty | cost | truth | {fix_title} | promised | gained", lines)


def publish(
    rows: Sequence[Run], names: Sequence[str], parts: Sequence[str], begin: str, page: Path | None
) -> None:
    """Print the tables, and write them behind the line `begin` of a page, up to the next heading."""
    text = "\n\n".join([*parts, f"Milliseconds of a step; {date.today()}."]) + "\n"
    measured = {row["case"] for row in rows}
    if missing := [name for name in names if name not in measured]:
        text += f"\nNot measured: {', '.join(missing)}.\n"
    print(text)
    if page:
        write_figures(page, begin, NEXT_HEADING, "\n" + text.removesuffix("\n"))


@contextmanager
def burning(is_burning: bool) -> Iterator[None]:
    """Let another process burn the last core, to which rank 1 is bound, if that is so."""
    if not is_burning:
        yield
        return
    core = str(max(os.sched_getaffinity(0)))
    process = subprocess.Popen(["taskset", "-c", core, sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()

"""What the two scores of the diagnosis share: their options, rows that are kept, and the page with the tables."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_arguments(about: str, *, repeat: int) -> argparse.Namespace:
    """Return the options; `repeat` is the default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose name contains this text")
    parser.add_argument(
        "--repeat", type=int, default=repeat, help="runs of each kind, in turn (default: %(default)s)"
    )
    parser.add_argument("--rows", type=Path, help="file of rows; cases that it has are not run again")
    parser.add_argument("--page", type=Path, help="Markdown to write")
    parser.add_argument("--keep", type=Path, help="directory that gets every run")
    return parser.parse_args()


def play(
    names: Sequence[str], judge: Callable[[str], Row], arguments: argparse.Namespace
) -> tuple[list[Row], int]:
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


def publish(
    rows: Sequence[Row], names: Sequence[str], parts: Sequence[str], begin: str, page: Path | None
) -> None:
    """Print the tables, and write them behind the line `begin` of a page, up to the next such line."""
    text = "\n\n".join([*parts, f"Milliseconds of a step; {date.today()}."]) + "\n"
    measured = {row["case"] for row in rows}
    if missing := [name for name in names if name not in measured]:
        text += f"\nNot measured: {', '.join(missing)}.\n"
    print(text)
    if page:
        before, found, after = page.read_text().partition(begin)
        if not found:
            raise SystemExit(f"{page} has no line {begin!r}: expected before the figures")
        _, heading, rest = after.partition("\n## ")
        page.write_text(f"{before}{begin}\n\n{text}{heading}{rest}")


def ms(seconds: float | None) -> str:
    """Return seconds in milliseconds; nothing for None."""
    return "" if seconds is None else f"{1000 * seconds:.1f}"


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def burning() -> Iterator[None]:
    """Let another process burn the last core, to which rank 1 is bound."""
    core = str(max(os.sched_getaffinity(0)))
    process = subprocess.Popen(["taskset", "-c", core, sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()

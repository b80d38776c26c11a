"""``python -m tests.run``: the gate, without what is marked `full`; with ``--all``: every test.

First the tests that need the machine to themselves, then the others side by side. A red test of real processes
runs once more, alone, at the end: if it passes then it is flaky, which is printed by name and kept in the table
``build/tests.tsv`` (verdict, seconds, test). Red twice is red. A unit test has one try.

    python -m tests.run --workers 3
    python -m tests.run --all
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.results import Result, read_results, write_results

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "build" / "tests.tsv"
REAL_PROCESSES = ("clusters", "docs", "golden", "net", "parity", "ranks")
"""Folders of tests whose outcome may depend on what else a machine does."""
MOST_AGAIN = 20
"""More red tests than these are no coincidence, and are not tried again."""
SLOW_SECONDS = 5.0
"""A test above this is to be marked `full("slow")`; those that import TensorFlow have three times as much."""
MOST_WORKERS = 4
_PASSED, _RED, _NONE_SELECTED = 0, 1, 5


class Session(NamedTuple):
    """What one pytest found."""

    code: int
    results: list[Result]


def main() -> int:
    """Run, print the summary, return 0 if nothing is red."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=about)
    parser.add_argument("--all", action="store_true", help="everything, not only the gate")
    parser.add_argument("--workers", default=str(min(os.cpu_count() or 1, MOST_WORKERS)), help="side by side")
    options = parser.parse_args()
    began = time.monotonic()
    mark = "" if options.all else "not full and "
    beside = ["-n", options.workers, "--dist=worksteal"]
    sessions = [
        _pytest("that need the machine to themselves", ["-m", f"{mark}alone", *_files_with("mark.alone")]),
        _pytest("side by side", ["-m", f"{mark}not alone", *beside]),
    ]
    results = [each for session in sessions for each in session.results]
    red = [each for each in results if each.verdict in ("failed", "error")]
    again = [each.name for each in red if each.name.split("/")[1] in REAL_PROCESSES]
    if again and len(red) <= MOST_AGAIN:
        passed = {each.name for each in _pytest("once more, alone", again).results if each.verdict == "passed"}
        results = [each._replace(verdict="flaky") if each.name in passed else each for each in results]
    write_results(TABLE, results)
    return _judge([each.code for each in sessions], results, time.monotonic() - began, whole=options.all)


def _files_with(text: str) -> list[str]:
    """Return the test files with this text, so that pytest need not import all the others."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in files if text in path.read_text(encoding="utf-8"))


def _pytest(title: str, words: list[str]) -> Session:
    print(f"Tests {title}", flush=True)
    file = TABLE.with_name("session.tsv")
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.results", "--results", str(file), *words]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return Session(code, read_results(file))


def _judge(codes: list[int], results: list[Result], seconds: float, *, whole: bool) -> int:
    counts = Counter(each.verdict for each in results)
    red = [each for each in results if each.verdict in ("failed", "error")]
    strange = [code for code in codes if code not in (_PASSED, _RED, _NONE_SELECTED)]
    # pytest is red, but no test is: a worker died. Or it found nothing to run, which proves nothing.
    unexplained = (_RED in codes and not red and not counts["flaky"]) or codes[-1] == _NONE_SELECTED
    print()
    if not whole:
        for each in results:
            limit = SLOW_SECONDS * (3 if "keras" in each.name or "tensorflow" in each.name else 1)
            if each.seconds > limit:
                print(
                    f"slow: {each.name}, {each.seconds:.1f} s: leave it to `make test-all` if it is so when alone"
                )
    for each in results:
        if each.verdict in ("flaky", "failed", "error"):
            print(f"{each.verdict}: {each.name}")
    said = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{said} in {seconds // 60:.0f}:{seconds % 60:02.0f}; the table is {TABLE.relative_to(ROOT)}")
    if strange or unexplained:
        print(f"pytest itself ended with {strange or codes}: see above")
    return int(bool(red or strange or unexplained))


if __name__ == "__main__":
    sys.exit(main())

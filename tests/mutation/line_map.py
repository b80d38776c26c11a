"""Which test runs which line, measured by a line tracer in one run of the tests, ranks included."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


@dataclass
class LineMap:
    """Which test runs which line, and how long it takes."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, set[int]]] = field(default_factory=lambda: defaultdict(dict))
    """By file and test."""
    failed: list[str] = field(default_factory=list)

    def tests_of(
        self, path: str, lines: range, *, at_import: bool, budget_seconds: float, own: Collection[str] = ()
    ) -> list[str]:
        """Return the tests that run one of `lines`, the most telling first, as many as fit into the budget.

        Those of the files `own` come first, and all of these files take turns; in a file one case of each test
        comes before a second case of any, the fast before the slow. With `at_import`, the lines run in no test of
        their own: any test that uses the file will do.
        """
        wanted = set(lines)
        found = [test for test, seen in self.lines.get(path, {}).items() if at_import or seen & wanted]
        cases: dict[str, int] = defaultdict(int)
        by_file: dict[str, list[tuple[int, float, str]]] = defaultdict(list)
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            function = test.partition("[")[0]
            by_file[test.partition("::")[0]].append((cases[function], self.seconds[test], test))
            cases[function] += 1
        ordered = [
            (file not in own, turn, seconds, test)
            for file, tests in by_file.items()
            for turn, (_, seconds, test) in enumerate(sorted(tests))
        ]
        chosen: list[str] = []
        total = 0.0
        for *_, seconds, test in sorted(ordered):
            if chosen and total + seconds > budget_seconds:
                continue
            chosen.append(test)
            total += seconds
        return chosen

    def add(self, file: Path) -> None:
        """Take in what a `LineWatch` wrote."""
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if not row["passed"]:
                self.failed.append(row["test"])
                continue
            self.seconds[row["test"]] = row["seconds"]
            for path, lines in row["lines"].items():
                self.lines[path][row["test"]] = set(lines)


class LineWatch:
    """A plugin of pytest that notes which lines of some files each test runs, on all of its ranks."""

    def __init__(self, source: Path, paths: Iterable[str], output: Path) -> None:
        self._names = {str(source / path): path for path in paths}
        self._output, self._folder = output, output.with_suffix(".ranks")
        self._seen: dict[str, set[int]] = defaultdict(set)
        self._passed, self._seconds = True, 0.0

    def begin(self, pool: Any) -> None:
        """Watch this process, and the ranks that are forked of it."""
        self._folder.mkdir()
        play = pool._play

        def watched(job: Any) -> Any:
            self._seen.clear()
            answer = play(job)
            file = self._folder / f"{os.getpid()}-{time.monotonic_ns()}.json"
            file.write_text(json.dumps(self._lines()))
            return answer

        pool._play = watched
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        path = self._names.get(frame.f_code.co_filename)
        if path is None:
            return None
        note = self._seen[path].add

        def line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                note(frame.f_lineno)
            return line

        return line

    def _lines(self) -> Mapping[str, list[int]]:
        return {path: sorted(lines) for path, lines in list(self._seen.items())}

    def pytest_runtest_setup(self) -> None:
        self._seen.clear()
        self._passed, self._seconds = True, 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed = self._passed and report.passed
        self._seconds += report.duration if report.when == "call" else 0.0
        if report.when != "teardown":
            return
        together = {path: set(lines) for path, lines in self._lines().items()}
        for file in self._folder.iterdir():
            for path, lines in json.loads(file.read_text()).items():
                together.setdefault(path, set()).update(lines)
            file.unlink()
        row = {
            "test": report.nodeid, "passed": self._passed, "seconds": round(self._seconds, 4),
            "lines": {path: sorted(lines) for path, lines in together.items()},
        }  # fmt: skip
        with self._output.open("a") as out:
            out.write(json.dumps(row) + "\n")

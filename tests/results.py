"""A pytest plugin: ``--results FILE`` gets a line for each test: verdict, seconds, name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

_BAD = ("failed", "error")


class Result(NamedTuple):
    """One test of one session."""

    verdict: str
    """"passed", "failed", "error" (in its fixtures), "skipped", or "flaky": failed beside others, passed alone."""
    seconds: float
    name: str


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--results", metavar="FILE", help="write verdict, seconds and name of each test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the process that the user started, not in its workers."""
    path = config.getoption("--results")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Collector(Path(path)))


class _Collector:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Result] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._found.get(report.nodeid, Result("passed", 0.0, report.nodeid))
        verdict = before.verdict
        if report.failed:
            verdict = "failed" if report.when == "call" else "error"
        elif report.skipped and verdict not in _BAD:
            verdict = "skipped"
        self._found[report.nodeid] = before._replace(verdict=verdict, seconds=before.seconds + report.duration)

    def pytest_sessionfinish(self) -> None:
        write_results(self._path, list(self._found.values()))


def write_results(path: Path, results: list[Result]) -> None:
    """Write the table, the slowest test first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sorted(results, key=lambda each: (-each.seconds, each.name))
    path.write_text("".join(f"{each.verdict}\t{each.seconds:.2f}\t{each.name}\n" for each in rows))


def read_results(path: Path) -> list[Result]:
    """Read the table; none where the session ended before it wrote one."""
    if not path.exists():
        return []
    parts = [line.split("\t", 2) for line in path.read_text().splitlines()]
    return [Result(verdict, float(seconds), name) for verdict, seconds, name in parts]

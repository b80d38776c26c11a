"""The report: one file, honest, escaped, small, and it renders in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from farandole.core.errors import ConfigError, DataError
from farandole.observe.report import write_report
from farandole.observe.report.charts import binned, ticks
from tests.unit.observe.runs import make_run

HOSTILE = "<script>alert('x')</script>&\"'"


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag not in ("meta", "br", "rect", "line", "polyline", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "line", "polyline", "polygon"):
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(path: Path) -> tuple[Balanced, str]:
    html = path.read_text()
    page = Balanced()
    page.feed(html)
    assert page.open == []
    assert not re.search(r"https?://|\bsrc=|@import|url\(", html), "the page refers to nothing outside"
    return page, " ".join(" ".join(page.text).split())


def test_the_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    make_run(tmp_path / "alone", compute=[0.2], samples=8)
    run = make_run(tmp_path / "both", compute=[0.100, 0.150], wire=0.012, data=0.0)
    path = write_report(run)
    assert path == run / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    _, text = parse(path)
    assert "2 ranks, 20 steps in 3.24 s: 49.4 samples/s, 1.25x one process (efficiency 0.62)." in text
    assert "15.4% of the time is waiting for others." in text
    assert "standard deviation of the ranks' compute 25 ms (20.0%)" in text
    assert "accumulate 1" in text
    assert "one process" in text


def test_hostile_text_is_shown_not_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", compute=[0.1, 0.1], command=["python", HOSTILE], hosts=[HOSTILE, "b"])
    (run / "failure.json").write_text(
        json.dumps({"rank": 1, "host": HOSTILE, "step": 3, "cause": HOSTILE, "traceback": HOSTILE})
    )
    page, text = parse(write_report(run))
    assert page.scripts == 0
    assert f"Rank 1 on {HOSTILE} failed after step 3: {HOSTILE}" in text
    assert text.count("alert") >= 5


def test_a_thousand_steps_of_eight_ranks_are_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", compute=[0.1 + 0.001 * r for r in range(8)], steps=1000)
    assert write_report(run).stat().st_size <= 500_000


def test_what_is_not_known_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", compute=[0.1], steps=1, samples=0, loss=False)
    (run / "run.json").unlink()
    _, text = parse(write_report(run))
    assert "samples/s unknown" in text
    assert "speedup unknown" in text
    assert "loss, first and last unknown, unknown" in text
    assert "missing or unreadable: the environment is unknown" in text
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_text('{"size": 2}')
    _, text = parse(write_report(empty))
    assert "2 ranks: no step was recorded." in text


def test_directories_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory"):
        write_report(tmp_path / "missing")
    with pytest.raises(DataError, match="holds nothing of a run"):
        write_report(tmp_path)
    run = make_run(tmp_path / "r", compute=[0.1])
    with pytest.raises(ConfigError, match=r"cannot write /proc/nowhere/x\.html"):
        write_report(run, Path("/proc/nowhere/x.html"))


def test_charts_stay_bounded_and_finite() -> None:
    points = [(float(i), float("nan") if i % 3 == 0 else float(i)) for i in range(10_000)]
    assert len(binned(points)) <= 200
    assert ticks(3.0, 3.0)
    for low, high in ((0, 1e-9), (0, 1e12), (-5, 7), (2.9, 5.4)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert all(low - 1e-9 <= t <= high * (1 + 1e-6) for t in found)


def test_it_opens_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs Debian's chromium")
    path = write_report(make_run(tmp_path / "r", compute=[0.1, 0.12]))
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    flags += f"--disable-sync --disable-quic --no-first-run --user-data-dir={tmp_path / 'profile'} --dump-dom"
    dom = subprocess.run(
        [browser, *flags.split(), path.as_uri()], capture_output=True, text=True, timeout=50, check=True
    ).stdout
    assert "2 ranks, 20 steps in" in dom
    assert dom.count("<svg") >= 4

"""Commands without RUN read the run that was started last, and say which."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import DataError
from farandole.core.vocabulary.run_files import RUN
from farandole.observe.records.run_reader import newest_run
from tests.unit.cli.test_cli import call
from tests.unit.observe.phased_run import make_phased_run


def test_the_newest_is_the_one_that_was_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no RUN was given, and .*runs/ holds none"):
        newest_run()
    for name, when in (("z", 1), ("a", 3), ("m", 2)):
        path = Path("runs", name, RUN)
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (when, when))
    Path("runs/later").mkdir()
    assert newest_run() == Path("runs/a"), "a directory without run.json is no run"


def test_diagnose_report_and_top_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (make_phased_run(tmp_path / "runs" / name) for name in ("b", "a"))
    os.utime(old / RUN, (1, 1))
    monkeypatch.chdir(tmp_path)
    for words in (["diagnose", "--json"], ["top", "--json"], ["report", "--json"]):
        code, out, err = call(*words)
        assert code == 0, err
        assert "farandole: the newest run: runs/a\n" in err
        json.loads(out)
    assert (new / "report.html").exists()
    assert not (old / "report.html").exists()


def test_compare_takes_the_newest_two_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for when, name in enumerate(("z", "b", "a")):
        os.utime(make_phased_run(tmp_path / "runs" / name) / RUN, (when, when))
    monkeypatch.chdir(tmp_path)
    code, out, err = call("compare", "--json")
    assert code == 0, err
    assert "farandole: the newest two runs: runs/b and runs/a\n" in err
    assert json.loads(out)

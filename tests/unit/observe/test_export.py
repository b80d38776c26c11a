"""`farandole export`: what each format's readers may assume of the files, on a run whose truth is known."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from farandole.cli.commands.export import FORMATS as OFFERED
from farandole.core.vocabulary.errors import ConfigError, DataError
from farandole.observe.export.chrome import Span, nested
from farandole.observe.export.formats import FORMATS, export_run
from tests.unit.cli.test_cli import call
from tests.unit.observe.phased_run import STEP, WALL_SECONDS, make_phased_run
from tests.unit.observe.runs import make_run


@pytest.fixture
def phased(tmp_path: Path) -> Path:
    return make_phased_run(tmp_path / "r")


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def test_the_command_offers_what_there_is() -> None:
    assert tuple(FORMATS) == OFFERED


def test_chrome_has_all_ranks_on_one_clock(phased: Path) -> None:
    export_run(phased, "chrome", None)
    path = phased / "trace.json"
    assert path.stat().st_mode & 0o777 == 0o600
    head = json.loads(path.read_text())["otherData"]
    assert head["start_time_since_epoch_in_micros"] == WALL_SECONDS * 10**6
    events = events_of(path)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0 on h", "rank 1 on h"}
    spans = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    backward = [e for e in spans if e["name"] == "backward"]
    assert [e["dur"] for e in backward if e["pid"] == 1] == pytest.approx([20_000] * 10, abs=2)
    assert [e["dur"] for e in backward if e["pid"] == 2] == pytest.approx([40_000] * 10, abs=2)
    check_nesting(spans)
    assert not [e for e in events if e["pid"] == 0 or e.get("tid") == 0], "viewers take 0 for the idle task"
    arrows = [e for e in events if e["ph"] in "sf"]
    assert len(arrows) == 20, "rank 0 waits for rank 1 in each step"
    assert {(e["ph"], e["pid"]) for e in arrows} == {("s", 2), ("f", 1)}
    assert arrows[0]["name"] == "rank 0 waited 20.0 ms for rank 1"
    assert arrows[0]["ts"] == pytest.approx(52_000, abs=2)
    memory = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "memory (MiB)"]
    assert memory[0] == {"resident": pytest.approx(117.3, abs=0.1)}


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """On a thread, a viewer takes spans that overlap without nesting for garbage."""
    lanes = defaultdict(list)
    for span in spans:
        lanes[span["pid"], span["tid"]].append((span["ts"], -span["dur"]))
    for lane in lanes.values():
        ends: list[float] = []
        for begin, minus in sorted(lane):
            while ends and ends[-1] <= begin + 0.01:
                ends.pop()
            assert not ends or begin - minus <= ends[-1] + 0.01
            ends.append(begin - minus)


def test_clocks_an_hour_apart_are_one_in_the_trace(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r", clocks=[0.0, 3600.0])
    events = events_of(export_run(run, "chrome", tmp_path / "t.json.gz").files[0])
    begins = {e["pid"]: e["ts"] for e in reversed(events) if e["ph"] == "X" and e["name"] == "step 3"}
    assert begins[1] == pytest.approx(begins[2], abs=50)


def test_ranks_whose_clocks_were_not_compared_are_said_to_be_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", compute=[0.01, 0.02], hosts=["a", "b"])
    done = export_run(run, "chrome", None)
    assert "the clock of host b was not compared" in done.notes[0]
    events = events_of(done.files[0])
    assert "rank 1 on b (its own clock)" in {e["args"].get("name") for e in events if e["ph"] == "M"}
    assert not [e for e in events if e["ph"] == "s"], "nobody knows who waited for whom"


def test_records_of_version_1_have_what_they_know(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    header = {"rank": 0, "size": 1, "host": "h", "process_id": 1, "generation": 0, "begin_seconds": 5.0}
    row = {"step": 1, "begin_seconds": 5.0, "end_seconds": 6.0, "data_seconds": 0.25, "samples": 4}
    wait = {"launch_seconds": [5.5], "wait_begin_seconds": 5.75, "wait_end_seconds": 5.9, "sent_bytes": 8}
    lines = [{"version": 1, **header, "wall_time": "2026-01-01"}, {**row, "exchanges": [wait]}]
    (run / "events-rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans = [e for e in events_of(export_run(run, "chrome", None).files[0]) if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("step 1", 0, 1e6), ("data", 0, 250_000), ("compute", 250_000, 500_000), ("exchange", 750_000, 150_000),
        ("compute", 900_000, 100_000), ("bucket 0", 500_000, 400_000),
    ]  # fmt: skip
    for name in FORMATS:
        assert export_run(run, name, tmp_path / name).files


def test_nested_cuts_what_ends_outside() -> None:
    spans = [Span("", "outer", 0.0, 2.0), Span("", "straddles", 1.0, 3.0), Span("", "later", 2.0, 4.0)]
    assert [(s.name, s.end_seconds) for s in nested(spans)] == [("outer", 2.0), ("straddles", 2.0), ("later", 4.0)]


def test_tensorboard_has_a_folder_a_rank_and_the_same_bytes_each_time(phased: Path) -> None:
    files = export_run(phased, "tensorboard", None).files
    assert [path.parent.name for path in files] == ["all", "rank0", "rank1"]
    before = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in export_run(phased, "tensorboard", None).files] == before


def test_tensorboard_itself_reads_them(phased: Path) -> None:
    code = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
every, rank = (EventAccumulator(sys.argv[1] + name).Reload() for name in ("/all", "/rank1"))
print("RESULT", every.Scalars("loss")[3].value, every.Scalars("share/waiting")[0].value,
      rank.Scalars("phase/backward seconds")[9].value, rank.Scalars("host/resident bytes")[0].value,
      rank.Scalars("step/seconds")[0].wall_time)
"""
    export_run(phased, "tensorboard", phased / "tb")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(phased / "tb")],
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    *figures, wall = [float(word) for word in done.stdout.split("RESULT")[1].split()]
    assert figures == pytest.approx([1.0, 10 / 68, 0.04, 123_000_000], rel=1e-3)
    assert wall == pytest.approx(WALL_SECONDS + STEP, abs=1e-3)


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [
        (["--to", "tensorboard"], "tensorboard", "tensorboard"),
        (["--to", "openmetrics"], "prometheus_client", "prometheus"),
        (["--to", "prometheus"], "prometheus_client", "prometheus"),
    ],
)
def test_a_format_whose_package_is_missing_names_the_extra(
    words: list[str], missing: str, extra: str, phased: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = call("export", str(phased), *words)
    assert (code, out) == (2, "")
    assert f"this format needs {missing}, which cannot be imported" in err
    assert f"[{extra}]'" in err
    assert "install it with: pip install -e '/" in err
    assert err.count("\n") == 1


def test_prometheus_and_openmetrics_pass_their_parsers(phased: Path) -> None:
    for name, parse in (("prometheus", prometheus), ("openmetrics", openmetrics)):
        text = export_run(phased, name, None).files[0].read_text()
        points = {
            (s.name, s.labels.get("rank"), s.labels.get("phase"), s.labels.get("quantile")): s.value
            for family in parse(text)
            for s in family.samples
        }
        assert points["farandole_steps_total", "1", None, None] == 10
        assert points["farandole_phase_seconds_total", "1", "backward", None] == pytest.approx(0.4, rel=1e-3)
        assert points["farandole_step_seconds", "0", None, "0.5"] == pytest.approx(STEP, rel=1e-3)
        assert points["farandole_step_seconds_count", "0", None, None] == 10
        assert points["farandole_resident_bytes", "0", None, None] == 123_000_000
        assert points["farandole_run_info", None, None, None] == 1
        assert (text.endswith("# EOF\n")) == (name == "openmetrics")


def test_labels_with_hostile_text_are_escaped(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / 'r"\\', host='a"b\\c\nd')
    text = export_run(run, "openmetrics", tmp_path / "m").files[0].read_text()
    assert 'farandole_steps_total{host="a\\"b\\\\c\\nd",rank="0",run="r\\"\\\\"} 10.0' in text.splitlines()


def test_only_the_steps_asked_for(phased: Path) -> None:
    path = export_run(phased, "chrome", None, steps=(3, 4)).files[0]
    steps = [e for e in events_of(path) if e["ph"] == "X" and e["name"].startswith("step")]
    assert [e["name"] for e in steps] == ["step 3", "step 4"] * 2
    assert steps[0]["ts"] == 0
    epoch = json.loads(path.read_text())["otherData"]["start_time_since_epoch_in_micros"]
    assert epoch == pytest.approx(WALL_SECONDS * 10**6 + 2 * 68_000, abs=2)
    with pytest.raises(ConfigError, match="--steps 40-50: the run has rows of steps 1 to 10"):
        export_run(phased, "chrome", None, steps=(40, 50))


def test_bad_input_is_refused_in_one_line(phased: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for words, text in [
        ([str(tmp_path / "none"), "--to", "chrome"], "is not a run directory"),
        ([str(tmp_path / "empty"), "--to", "chrome"], "has no records to export: there are no events-rank"),
        ([str(phased), "--to", "chorme"], "invalid choice: 'chorme'"),
        ([str(phased)], "the following arguments are required: --to"),
        ([str(phased), "--to", "tensorboard", "-o", str(tmp_path / "file")], "is no folder"),
        ([str(phased), "--to", "chrome", "-o", str(tmp_path / "empty")], "Is a directory"),
        ([str(phased), "--to", "chrome", "-o", str(tmp_path / "file" / "x")], "cannot write"),
        ([str(phased), "--to", "chrome", "--steps", "9-3"], "--steps '9-3': expected a range of steps"),
    ]:
        code, out, err = call("export", *words)
        assert (code, out) == (2, ""), err
        assert text in err
        assert err.count("\n") == 1
    with pytest.raises(ConfigError, match="did you mean 'chrome'"):
        export_run(phased, "chrom", None)
    with pytest.raises(DataError):
        export_run(tmp_path / "empty", "chrome", None)
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_command_says_what_it_wrote(phased: Path) -> None:
    (phased / "events-rank1.jsonl").unlink()
    code, out, err = call("export", str(phased), "--to", "chrome", "--json")
    assert code == 0
    assert json.loads(out)["files"] == [str(phased / "trace.json")]
    assert "1 of 2 ranks left no events" in err

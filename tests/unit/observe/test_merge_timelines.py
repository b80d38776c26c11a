"""The timelines of all ranks in one file, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.main import run
from farandole.core.vocabulary.errors import ConfigError, DataError
from farandole.observe.export.operation_timeline import OperationEvents, merge_timelines
from farandole.observe.export.trace_file import TraceFile
from tests import trace_format


def write(path: Path, rank: int, epoch_micros: int, *names: str, begin: float = 0.001) -> Path:
    """Write a rank's timeline: every operation takes 1 ms from `begin` seconds after the file's start."""
    events = OperationEvents(0.0, mark_cycles=True)
    events.header(epoch_micros, rank, 2, f"host{rank}")
    for name in names:
        events.submitted(name, "allreduce", begin)
        events.begun(name, "allreduce", begin)
        events.finished(name, "float32", (2,), begin + 0.001, "")
    file = TraceFile(path)
    file.write(events.take())
    file.close()
    return path


def test_two_hosts_that_began_at_different_times_are_put_on_one_clock(tmp_path: Path) -> None:
    # The same moment: 1 ms into the file of rank 0, which began 1.5 s after that of rank 1.
    second = write(tmp_path / "1.json", 1, 5_000_000, "a", "only on rank 1", begin=1.501)
    first = write(tmp_path / "0.json", 0, 6_500_000, "a")
    out = tmp_path / "all.json"
    count = merge_timelines([second, first], out)
    events = trace_format.check(out)
    assert len(events) == count
    lanes = trace_format.names(events)
    assert list(lanes) == ["0: a", "1: a", "1: only on rank 1"]
    assert lanes["0: a"] < lanes["1: a"] < lanes["1: only on rank 1"], "grouped by rank"
    for name in lanes:
        begun = [event["ts"] for event in trace_format.lane(events, name) if event.get("name") == "ALLREDUCE"]
        assert begun == [1_501_000]
    ranks = [event["args"] for event in events if event.get("name") == "process_name" and "rank" in event["args"]]
    assert [(values["rank"], values["host"]) for values in ranks] == [(0, "host0"), (1, "host1")]
    indices = [event for event in events if event.get("name") == "process_sort_index"]
    assert all(event["args"]["sort_index"] == event["pid"] for event in indices)
    cycles = [event for event in events if event.get("name") == "CYCLE_START"]
    assert {event["s"] for event in cycles} == {"p"}
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_timeline_in_horovods_own_form_can_be_merged(tmp_path: Path) -> None:
    """Its instants have no process, and it does not say its rank."""
    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 7}},
        {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "a"}},
        {"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 1},
        {"ph": "E", "ts": 9, "pid": 1},
        {"ph": "i", "name": "CYCLE_START", "ts": 4, "s": "g"},
    ]
    (tmp_path / "0.json").write_text(json.dumps(events))
    merge_timelines([tmp_path / "0.json", write(tmp_path / "1.json", 1, 7, "a")], tmp_path / "all.json")
    assert list(trace_format.names(trace_format.check(tmp_path / "all.json"))) == ["0: a", "1: a"]


def test_the_file_of_a_killed_rank_counts_up_to_its_cut(tmp_path: Path) -> None:
    first, second = write(tmp_path / "0.json", 0, 5, "a"), write(tmp_path / "1.json", 1, 5, "a", "b")
    second.write_bytes(second.read_bytes()[:-20])
    merge_timelines([first, second], tmp_path / "all.json")
    events = trace_format.check(tmp_path / "all.json", ended=False)
    assert "1: b" in trace_format.names(events)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, 1, 5, "a") for name in ("new.json", "old.json")]
    with pytest.raises(DataError, match=r"new\.json and .*old\.json are both of rank 1"):
        merge_timelines(paths, tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


HEADER = {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 7}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no json", "is no timeline"),
        ("", "is no timeline"),
        ("{}", "is no timeline"),
        ("[1]", "is no timeline"),
        ('{"traceEvents": 3}', "is no timeline"),
        ("[" * 100_000, "is no timeline"),
        ("[]", "does not say when it began"),
        ('[{"ph": "i"}]', "does not say when it began"),
        (
            json.dumps([{**HEADER, "args": {"start_time_since_epoch_in_micros": "x"}}]),
            "does not say when it began",
        ),
        (json.dumps([{**HEADER, "args": {**HEADER["args"], "rank": -1}}]), "does not say"),  # type: ignore[dict-item]
        (json.dumps([HEADER, {"ph": "i", "pid": "one"}]), "an event has pid 'one'"),
        (json.dumps([HEADER, {"ph": "i", "pid": True}]), "an event has pid True"),
        (json.dumps([HEADER, {"ph": "i", "pid": 1, "ts": "x"}]), "ts 'x'"),
        (json.dumps([HEADER, {"ph": "i", "pid": 1, "ts": float("nan")}]), "ts nan"),
        (json.dumps([HEADER, {"ph": "i", "pid": 1, "args": 3}]), "args 3"),
    ],
    ids=range(15),
)
def test_a_file_that_is_no_timeline_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError, match=says) as caught:
        merge_timelines([tmp_path / "bad.json"], tmp_path / "all.json")
    assert "bad.json" in str(caught.value)


def test_the_object_form_of_the_format_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(json.dumps({"traceEvents": [HEADER]}))
    assert merge_timelines([tmp_path / "0.json"], tmp_path / "all.json") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write(tmp_path / f"{rank}.json", rank, 5, "a")) for rank in (0, 1)]
    out = str(tmp_path / "all.json")
    assert run(["timeline", "merge", *paths, "-o", out]) == 0
    assert capsys.readouterr().out == f"{out}: 18 events of 2 ranks\n"
    assert run(["timeline", "merge", *paths, "-o", out, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer == {"timeline": out, "ranks": 2, "events": 18}
    trace_format.check(Path(out))


@pytest.mark.parametrize(
    "arguments", [["merge", "missing.json", "-o", "x"], ["merge", "x"], ["split", "x", "-o", "y"]]
)
def test_the_commands_errors_are_those_of_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["timeline", *arguments]) == 2
    assert capsys.readouterr().err.startswith("farandole: ")


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "0.json", 0, 5, "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*all\.json"):
        merge_timelines([path], tmp_path / "file" / "all.json")

"""`farandole import` of traces that are long, cut or damaged: held in part, and refused with the place."""

from __future__ import annotations

import gzip
import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import DataError
from farandole.observe.importers import import_traces
from farandole.observe.importers.foreign_rank import ForeignRank
from farandole.observe.importers.horovod import HorovodReader
from farandole.observe.importers.kineto import KinetoReader
from farandole.observe.importers.trace_text import Trace
from farandole.observe.read.timeline_reader import read_events
from tests.unit.observe.test_import import kineto


def timeline(steps: int, *, names: int = 2, shape: str = "[8]") -> str:
    """Return a timeline without its closing bracket, as Horovod leaves it."""
    lines = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 7}}]
    lines += [
        {"name": "process_name", "ph": "M", "pid": lane, "args": {"name": f"allreduce.layer{lane}"}}
        for lane in range(1, names + 1)
    ]
    for step in range(steps):
        for lane in range(1, names + 1):
            at = 10_000 * step + 100 * lane
            for phase, name, after in (
                ("B", "NEGOTIATE_ALLREDUCE", 0), ("E", "", 50), ("B", "ALLREDUCE", 50),
                ("B", "NCCL_ALLREDUCE", 60), ("E", "", 80), ("E", "", 90),
            ):  # fmt: skip
                lines.append({"ph": phase, "name": name, "ts": at + after, "pid": lane, "args": {"shape": shape}})
    return "[\n" + ",\n".join(map(json.dumps, lines)) + ",\n"


def read(path: Path, piece_bytes: int) -> ForeignRank:
    reader = KinetoReader() if "kineto" in path.name else HorovodReader()
    trace = Trace(path, reader.keys, piece_bytes=piece_bytes)
    for event in trace.events():
        reader.take(event)
    rank = reader.finish(trace, 0)
    rank.steps = list(rank.steps)
    return rank


@pytest.mark.parametrize("name", ["kineto.json", "kineto.json.gz", "timeline.json"])
def test_the_size_of_pieces_changes_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if "kineto" in name:
        kineto(path, 1, backward=45, gpu=True)
    else:
        path.write_text(timeline(3).replace("layer", "couche é "))
    whole = read(path, 1 << 20)
    assert len(list(whole.steps)) == 3
    for piece_bytes in (1, 2, 3, 5, 13, 64, 1000):
        assert read(path, piece_bytes) == whole


@pytest.mark.parametrize("kind", ["kineto", "kineto.gz", "horovod"])
def test_memory_does_not_follow_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("trace.json.gz" if kind.endswith(".gz") else "trace.json")
    most = 8_000_000
    if kind == "horovod":
        text = timeline(most // 60_000, names=10, shape="[8], " * 180)
    else:
        few = json.loads(kineto(tmp_path / "small.json", 0, backward=45, gpu=True).read_text())
        for event in few["traceEvents"]:
            event.setdefault("args", {})["Call stack"] = "train.py(7): step; " * 80
        event = json.dumps(few["traceEvents"])[1:-1]
        few["traceEvents"] = ["here"]
        text = json.dumps(few).replace('"here"', ",\n".join([event] * (most // len(event))))
    path.write_bytes(gzip.compress(text.encode(), 1) if kind.endswith(".gz") else text.encode())
    tracemalloc.start()
    try:
        import_traces([path], tmp_path / "run")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(text) > 0.95 * most
    assert peak < 0.3 * len(text), f"{peak:,} bytes held of {len(text):,}"
    assert len(read_events(tmp_path / "run/events-rank0.jsonl").steps) >= 3


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    data = kineto(tmp_path / "a.json.gz", 0, backward=45).read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True)
    writer.start()
    import_traces([pipe], tmp_path / "run")
    writer.join(10)
    assert len(read_events(tmp_path / "run/events-rank0.jsonl").steps) == 3


def refusal(path: Path, data: bytes | str) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(DataError) as problem:
        import_traces([path], path.parent / "run")
    assert not (path.parent / "run").exists()
    return str(problem.value)


def test_gzip_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = kineto(tmp_path / "a.json.gz", 0, backward=45).read_bytes()
    for at in range(2, len(data), 29):
        assert f"cannot read {tmp_path / 'cut.gz'}: " in refusal(tmp_path / "cut.gz", data[:at])
    long = gzip.compress(timeline(1_500).encode(), 1)
    said = refusal(tmp_path / "cut.gz", long[:-20])
    assert "ended before the end-of-stream marker was reached, after " in said
    events = int(said.split(" bytes of text and ")[1].split(" events")[0].replace(",", ""))
    assert 5_000 < events < 18_003, said
    broken = bytearray(long)
    broken[len(long) // 2] ^= 0xFF
    said = refusal(tmp_path / "cut.gz", bytes(broken))
    assert "cannot read" in said or "is damaged after" in said


def test_an_object_that_is_cut_or_damaged_is_refused_with_the_place(tmp_path: Path) -> None:
    text = json.dumps(json.loads(kineto(tmp_path / "a.json", 0, backward=45).read_text()), indent=1)
    path = tmp_path / "t.json"
    for at in range(1, len(text), 499):
        said = refusal(path, text[:at])
        assert f"{path} is cut short after" in said, (text[:at], said)
        assert "was it copied whole, and had its writer ended?" in said
    lines = text[: text.index('"ts": 1085000.0')].count("\n") + 1
    said = refusal(path, text.replace('"ts": 1085000.0', '"ts" 1085000.0'))
    assert f"is damaged after 8 events: Expecting ':' delimiter at line {lines}, column " in said
    for bad, message in {
        '{"traceEvents": [], "traceEvents": []}': "has traceEvents twice",
        '{"traceEvents": 3}': "is no trace: expected a JSON array",
        '{"events": []}': "is no trace: expected a JSON array",
        '{"traceEvents": []} {}': "is damaged after 0 events: expected nothing more, found '{', at line 1",
        "": "is no trace: expected a JSON array",
        '{"schemaVersion": 1e, "traceEvents": []}': "is damaged after 0 events: expected , or }, found 'e'",
    }.items():
        assert message in refusal(path, bad)


def test_a_timeline_that_is_cut_is_read_up_to_there_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = timeline(3)
    for number, (tail, note) in enumerate({
        "": "", "]": "", '{"ph": "B", "na': "line 41, column 13", "\0\0\0\0": "line 41, column 1",
        '{"ph"': "line 41, column 6",
    }.items()):  # fmt: skip
        path.write_text(text + tail)
        notes = import_traces([path], tmp_path / f"run{number}")
        assert len(notes) == bool(note), notes
        assert not note or ("t.json is cut short, its last event is left out: " in notes[0] and note in notes[0])
        assert len(read_events(tmp_path / f"run{number}/events-rank0.jsonl").steps) == 3


def test_an_array_that_is_damaged_before_its_end_is_refused(tmp_path: Path) -> None:
    lines = timeline(3).splitlines()
    middle = len(lines) // 2
    broken = [*lines[:middle], "\0\0", *lines[middle:]]
    said = refusal(tmp_path / "t.json", "\n".join(broken))
    assert f"is damaged after {middle - 1} events: Expecting value at line {middle + 1}, column 1" in said
    said = refusal(tmp_path / "t.json", "".join(broken))
    assert f"is damaged after {middle - 1} events: Expecting value at line 1, column " in said


def test_an_event_without_end_is_not_held(tmp_path: Path) -> None:
    """Of 200 MB, which gzip makes 0.2 of, no more than the limit is unpacked."""
    packed = gzip.compress(b"a" * 4_000_000, 1)
    data = gzip.compress(b'[{"ph": "X", "name": "') + packed * 50
    tracemalloc.start()
    try:
        said = refusal(tmp_path / "t.json.gz", data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "is damaged after 0 events: a value is longer than 16,777,216 characters at line 1, column 2" in said
    assert peak < 100_000_000


def test_numbers_beyond_any_time_are_left_out(tmp_path: Path) -> None:
    path = kineto(tmp_path / "a.json", 0, backward=45)
    huge = {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 10**400, "dur": 1}
    odd = {"ph": "B", "pid": [1], "ts": 1, "name": "ALLREDUCE"}
    whole = json.loads(path.read_text())
    whole["traceEvents"] += [huge, {**huge, "ts": 1, "dur": 10**400}, {**huge, "ts": 5, "dur": -9}, odd]
    path.write_text(json.dumps(whole))
    assert import_traces([path], tmp_path / "run") == []
    assert len(read_events(tmp_path / "run/events-rank0.jsonl").steps) == 3

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
from farandole.observe.importers.kineto import read_kineto
from farandole.observe.read.timeline_reader import read_events
from tests.unit.observe.test_import import kineto


@pytest.mark.parametrize("name", ["kineto.json", "kineto.json.gz"])
def test_the_size_of_pieces_changes_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    kineto(path, 1, backward=45, gpu=True)
    whole = read_kineto(path, 0)
    assert len(whole.steps) == 3
    for piece_bytes in (1, 2, 3, 5, 13, 64, 1000):
        assert read_kineto(path, 0, piece_bytes=piece_bytes) == whole


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_memory_does_not_follow_the_file(name: str, tmp_path: Path) -> None:
    path, most = tmp_path / name, 8_000_000
    few = json.loads(kineto(tmp_path / "small.json", 0, backward=45, gpu=True).read_text())
    for event in few["traceEvents"]:
        event.setdefault("args", {})["Call stack"] = "train.py(7): step; " * 80
    event = json.dumps(few["traceEvents"])[1:-1]
    few["traceEvents"] = ["here"]
    text = json.dumps(few).replace('"here"', ",\n".join([event] * (most // len(event))))
    path.write_bytes(gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode())
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
    whole = json.loads(kineto(tmp_path / "b.json", 0, backward=45).read_text())
    whole["traceEvents"] *= 500
    long = gzip.compress(json.dumps(whole).encode(), 1)
    said = refusal(tmp_path / "cut.gz", long[:-20])
    assert "ended before the end-of-stream marker was reached, after " in said
    events = int(said.split(" bytes of text and ")[1].split(" events")[0].replace(",", ""))
    assert 5_000 < events < len(whole["traceEvents"]), said
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
        '{"traceEvents": 3}': "expected a JSON object with traceEvents",
        '{"events": []}': "expected a JSON object with traceEvents",
        '{"traceEvents": []} {}': "is damaged after 0 events: expected nothing more, found '{', at line 1",
        "": "expected a JSON object with traceEvents",
        '{"schemaVersion": 1e, "traceEvents": []}': "is damaged after 0 events: expected , or }, found 'e'",
        '{"traceEvents": [{}' + "[" * 100_000: "is damaged after 1 events: expected , or ], found '['",
        '{"traceEvents": [{}, ' + "[" * 100_000: "is damaged after 1 events: a value is nested too deeply",
    }.items():
        assert message in refusal(path, bad)


def test_names_that_are_no_utf_8_are_read(tmp_path: Path) -> None:
    path = kineto(tmp_path / "a.json", 0, backward=45)
    path.write_bytes(path.read_bytes().replace(b"aten::linear", b"aten::lin\xff\xe9ar"))
    assert import_traces([path], tmp_path / "run") == []


def test_an_event_without_end_is_not_held(tmp_path: Path) -> None:
    """Of 200 MB, which gzip makes 0.2 of, no more than the limit is unpacked."""
    packed = gzip.compress(b"a" * 4_000_000, 1)
    data = gzip.compress(b'{"traceEvents": [{"ph": "X", "name": "') + packed * 50
    tracemalloc.start()
    try:
        said = refusal(tmp_path / "t.json.gz", data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "is damaged after 0 events: a value is longer than 16,777,216 characters at line 1, column 18" in said
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

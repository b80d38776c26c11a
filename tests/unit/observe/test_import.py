"""`farandole import`: what is read of the traces of other tools, and how one that is none is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from farandole.cli import main as command_line
from farandole.core.vocabulary.errors import DataError
from farandole.observe.export import export_run
from farandole.observe.figures.summary import summarise
from farandole.observe.format.phases import step_seconds
from farandole.observe.importers import import_traces
from farandole.observe.read.timeline_reader import read_events
from tests.unit.cli.test_cli import call
from tests.unit.observe.phased_run import make_phased_run

MS = 1000


def kineto(
    path: Path, rank: int, *, backward: float, gpu: bool = False, marks: bool = True, base: int = 10
) -> Path:
    """Write 3 steps of 100 ms: data 0-5, forward 10-30, backward from 30, a collective that ends at 80."""

    def event(cat: str, name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
        times = {"ts": round(begin * MS, 3), "dur": round((end - begin) * MS, 3)}
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, **times, "args": args}

    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    for step in range(3):
        at = 1000.0 + 100 * step
        if marks:
            events.append(event("user_annotation", f"ProfilerStep#{step + 7}", at, at + 99))
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        events += [
            event("user_annotation", loader, at, at + 5),
            event("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", at + 6, at + 8),
            event("cpu_op", "aten::linear", at + 10, at + 12),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 30, at + 31),
            event("cpu_op", "autograd::engine::evaluate_function: X", at + backward - 1, at + backward),
            event("cpu_op", "c10d::allreduce_", at + 40, at + 41),
            event("user_annotation", "Optimizer.step#SGD.step", at + 85, at + 95),
        ]
        if gpu:
            events += [
                event("kernel", "sgemm", at + 35, at + 60, stream=7),
                event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 50, at + 80, stream=20,
                      **{"In msg nelems": 1000, "dtype": "BFloat16"}),
                event("gpu_user_annotation", "nccl:all_reduce", at + 50, at + 80),
            ]  # fmt: skip
        else:
            events.append(event("user_annotation", "gloo:all_reduce", at + 60, at + 80))
            events.append(event("user_annotation", "gloo:broadcast", at + 15, at + 16))
    info = {"backend": "nccl" if gpu else "gloo", "rank": rank, "world_size": 2}
    whole = {
        "schemaVersion": 1, "distributedInfo": info, "host_name": "h", "baseTimeNanoseconds": base * 10**9,
        "traceEvents": events,
    }  # fmt: skip
    data = json.dumps(whole).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_profilers_trace_becomes_a_run(tmp_path: Path) -> None:
    paths = [kineto(tmp_path / "b.json.gz", 1, backward=70), kineto(tmp_path / "a.json", 0, backward=45)]
    notes = import_traces(paths, tmp_path / "run")
    assert notes == []
    ranks = [read_events(tmp_path / "run" / f"events-rank{rank}.jsonl") for rank in (0, 1)]
    assert [row.step for row in ranks[0].steps] == [8, 9, 10], "ProfilerStep#0 is the first step"
    seconds = step_seconds(ranks[0].steps[0])
    assert seconds == pytest.approx(
        {"data": 0.005, "forward": 0.02, "backward": 0.015, "exchange": 0.035, "optimizer": 0.01, "other": 0.015},
        abs=1e-5,
    )
    (exchange,) = ranks[0].steps[0].exchanges
    (bucket,) = exchange.buckets
    begin = ranks[0].steps[0].begin_seconds
    times = [bucket.launch_seconds, bucket.begin_seconds, bucket.end_seconds]
    assert [at - begin for at in times] == pytest.approx([0.04, 0.06, 0.08], abs=1e-5)
    assert step_seconds(ranks[1].steps[0])["backward"] == pytest.approx(0.04, abs=1e-5)
    summary = summarise(tmp_path / "run")
    assert (summary.size, summary.steps) == (2, 3)
    assert summary.step_seconds == pytest.approx(0.1, abs=1e-3)
    assert call("report", str(tmp_path / "run"))[0] == 0


def test_on_an_accelerator_the_wait_is_what_no_kernel_covers(tmp_path: Path) -> None:
    import_traces([kineto(tmp_path / "a.json", 0, backward=45, gpu=True)], tmp_path / "run")
    row = read_events(tmp_path / "run/events-rank0.jsonl").steps[0]
    (exchange,) = row.exchanges
    wait = [exchange.wait_begin_seconds - row.begin_seconds, exchange.wait_end_seconds - row.begin_seconds]
    assert wait == pytest.approx([0.06, 0.08], abs=1e-5)
    assert [bucket.nbytes for bucket in exchange.buckets] == [2000]


def test_without_marks_steps_end_with_the_optimizer(tmp_path: Path) -> None:
    notes = import_traces([kineto(tmp_path / "a.json", 0, backward=45, marks=False)], tmp_path / "run")
    assert notes == ["a.json: no profiler.step(): steps end with Optimizer.step"]
    rows = read_events(tmp_path / "run/events-rank0.jsonl").steps
    assert [round(row.end_seconds - row.begin_seconds, 3) for row in rows] == [0.095, 0.1, 0.1]


def test_files_of_different_days_are_not_put_on_one_clock(tmp_path: Path) -> None:
    paths = [kineto(tmp_path / f"{rank}.json", rank, backward=45, base=10 + 86400 * rank) for rank in (0, 1)]
    (note,) = import_traces(paths, tmp_path / "run")
    assert "first steps are taken to begin together" in note
    begins = [read_events(tmp_path / f"run/events-rank{r}.jsonl").steps[0].begin_seconds for r in (0, 1)]
    assert begins[0] == begins[1] == 0


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    good = str(kineto(tmp_path / "a.json", 0, backward=45))
    timeline = str(
        export_run(make_phased_run(tmp_path / "r", ranks=1, steps=2), "horovod", tmp_path / "t.json").files[0]
    )
    no_trace = "is no trace of PyTorch's profiler: expected a JSON object with traceEvents"
    for name, text in {
        "text": "hello", "number": "3", "empty": "[]",
        "array": '[{"ph": "X", "ts": 1, "dur": 2, "cat": "cpu_op"}]',
        "profiled": '{"schemaVersion": 1, "traceEvents": []}', "odd": '{"traceEvents": [{"ts": "x"}, 7, null]}',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"[]")[:-9])
    for words, text in [
        ([str(tmp_path / "none")], "cannot read"),
        ([str(tmp_path / "broken.gz")], "cannot read"),
        ([str(tmp_path / "text")], no_trace),
        ([str(tmp_path / "number")], no_trace),
        ([str(tmp_path / "empty")], no_trace),
        ([str(tmp_path / "array")], no_trace),
        ([str(tmp_path / "profiled")], "has no event that took time"),
        ([timeline], no_trace),
        ([str(tmp_path / "odd")], "has no event that took time"),
        ([good, good], "are both of rank 0, expected one file a rank"),
        (["--from", "horovod", timeline], "invalid choice: 'horovod'"),
        (["--from", "nsys", good], "invalid choice: 'nsys'"),
    ]:
        code, out, err = call("import", *words, "-o", str(tmp_path / "new"))
        assert (code, out) == (2, ""), err
        assert text in err
        assert err.count("\n") == 1
        assert not (tmp_path / "new").exists()
    code, _, err = call("import", good, "-o", str(tmp_path / "r"))
    assert (code, "exists already" in err) == (2, True)
    with pytest.raises(DataError, match="no trace to import"):
        import_traces([], tmp_path / "new")


def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    path = kineto(tmp_path / "a.json", 0, backward=45, marks=False)
    code, out, err = call("import", str(path), "-o", str(tmp_path / "run"), "--json")
    assert code == 0
    assert json.loads(out)["ranks"] == 1
    assert err == "farandole: a.json: no profiler.step(): steps end with Optimizer.step\n"
    assert "import" in command_line.COMMANDS


def test_report_from_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [str(kineto(tmp_path / f"{rank}.json", rank, backward=45 + 20 * rank)) for rank in (0, 1)]
    code, out, err = call("report", "--from", "kineto", *paths)
    assert code == 0, err
    page = Path(out.strip())
    assert page.parent.parent == tmp_path / "runs"
    assert "<svg" in page.read_text()
    (tmp_path / "none.json").write_text("{}")
    code, _, err = call("report", "--from", "kineto", "none.json")
    assert (code, "expected a JSON object with traceEvents" in err) == (2, True)
    assert len(list((tmp_path / "runs").iterdir())) == 1, "what was unsound left nothing"
    code, _, err = call("report", *paths)
    assert (code, "2 runs were given, expected one; for traces of other tools give --from" in err) == (2, True)

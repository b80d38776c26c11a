"""The suite's commands and page, and MLPerf's lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farandole.bench.measure.machine import machine_facts
from farandole.bench.measure.mllog import line, step_lines
from farandole.bench.suite.entries import SUITES
from farandole.bench.suite.suite import to_markdown
from farandole.cli.commands.bench.command import BENCHMARKS

ROW: dict[str, Any] = {
    "contender": "none", "chosen": None, "seconds": 0.5, "interval": (0.4, 0.6), "ratio": None,
    "ratio_interval": None, "processor_seconds": 0.3, "sent_bytes": 1e6, "loss": 2.5, "samples": [0.5, 0.4],
    "samples_per_second": 8.0,
}  # fmt: skip
RESULT: dict[str, Any] = {
    "model": "mlp", "batch": 2, "ranks": 2, "rows": [ROW], "reference": None,
    "absent": [{"contender": "horovod", "reason": "not installed"}],
}  # fmt: skip


@pytest.mark.parametrize("name", SUITES)
def test_every_command_of_a_suite_is_one_that_bench_takes(name: str) -> None:
    for entry in SUITES[name]:
        benchmark, *words = entry.command("1gbit")
        BENCHMARKS[benchmark][0]().parse_args(words)


def test_the_page_has_commands_tables_and_what_failed() -> None:
    step = {"title": "A step", "command": ["step", "--model", "mlp"], "result": RESULT}
    failed = {"title": "Another", "command": ["codecs"], "failed": "exit code 1"}
    page = to_markdown(
        {"machine": machine_facts(), "suite": "quick", "rate": "none", "notes": [], "entries": [step, failed]}
    )
    assert "## A step\n\n`farandole bench step --model mlp`\n\n| contender | step |" in page
    assert "\n| none | 500 ms | 400 ms to 600 ms | 8 |" in page
    assert "|\n\ndid not run: horovod: not installed\n" in page, "no row of the table"
    assert "## Another\n\n`farandole bench codecs`\n\nNo numbers: exit code 1.\n" in page


def test_mllog_lines_have_the_fields_of_the_specification() -> None:
    lines = step_lines(RESULT, begin_ms=1000, end_ms=2000)
    assert all(text.startswith(":::MLLOG {") for text in lines)
    events = [json.loads(text.removeprefix(":::MLLOG ")) for text in lines]
    for event in events:
        assert list(event) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert event["event_type"] in ("INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME")
    by_key = {event["key"]: event for event in events}
    assert by_key["global_batch_size"]["value"] == 4
    assert by_key["run_start"] == {
        "namespace": "", "time_ms": 1000, "event_type": "INTERVAL_START", "key": "run_start", "value": None,
        "metadata": {},
    }  # fmt: skip
    assert by_key["run_stop"]["metadata"] == {"status": "success"}
    nothing = step_lines({**RESULT, "rows": []}, begin_ms=1000, end_ms=2000)
    assert json.loads(nothing[-1].removeprefix(":::MLLOG "))["metadata"] == {"status": "aborted"}
    stats = [event for event in events if event["key"] == "tracked_stats"]
    assert [event["value"]["throughput"] for event in stats] == [8.0, 10.0]
    assert [event["metadata"]["step"] for event in stats] == [1, 2]
    assert json.loads(line("seed", 1).split(" ", 1)[1])["time_ms"] > 1_700_000_000_000

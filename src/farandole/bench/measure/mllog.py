"""Lines as MLPerf's logging writes them: ``:::MLLOG {"namespace": ..., "key": ..., ...}``.

The keys are MLPerf's where it has one. They make results readable to tools that know the format; they are no claim
of a run by MLPerf's rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

START, END, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


def line(
    key: str, value: Any, *, event: str = POINT, namespace: str = "", time_ms: int | None = None, **metadata: Any
) -> str:
    """Return one line; `time_ms` is since 1970, by default now."""
    at = time.time_ns() // 1_000_000 if time_ms is None else time_ms
    fields = {
        "namespace": namespace, "time_ms": at, "event_type": event, "key": key, "value": value,
        "metadata": metadata,
    }  # fmt: skip
    return f":::MLLOG {json.dumps(fields)}"


def step_lines(result: Mapping[str, Any], *, begin_ms: int, end_ms: int) -> list[str]:
    """Return the lines of what `bench_step` measured from `begin_ms` to `end_ms`; a namespace a contender."""
    shape = {
        "submission_benchmark": result["model"], "global_batch_size": result["batch"] * result["ranks"], "seed": 0,
        "opt_name": "sgd", "opt_base_learning_rate": 0.05, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    lines = [line(key, value, time_ms=begin_ms) for key, value in shape.items()]
    lines.append(line("run_start", None, event=START, time_ms=begin_ms))
    for row in result["rows"]:
        for step, seconds in enumerate(row["samples"], start=1):
            rate = result["batch"] * result["ranks"] / seconds
            lines.append(
                line("tracked_stats", {"throughput": rate, "step_time": seconds}, namespace=row["contender"],
                     time_ms=end_ms, step=step)
            )  # fmt: skip
    status = "success" if result["rows"] else "aborted"
    return [*lines, line("run_stop", None, event=END, time_ms=end_ms, status=status)]

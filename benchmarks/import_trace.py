"""What `farandole import` of a large trace takes: its peak of resident memory, time and processor time.

python benchmarks/import_trace.py --megabytes 500 [--gzip]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_STEP_MICROSECONDS = 250_000
_OPERATIONS = 4_000
"""Of the processor in a step; as many kernels again, as a large language model has."""


def kineto(step: int) -> Iterator[str]:
    """Yield the events of a step as PyTorch's profiler writes them, in the order of their kinds, not of time."""
    at = 1_000_000 + step * _STEP_MICROSECONDS
    span = 0.8 * _STEP_MICROSECONDS / _OPERATIONS
    for number in range(_OPERATIONS):
        begin = at + 10_000 + number * span
        backward = number > _OPERATIONS // 3
        name = "autograd::engine::evaluate_function: MmBackward0" if backward and number % 4 == 0 else "aten::mm"
        sizes = {"Sequence number": number, "Fwd thread id": 0, "Record function id": 0, "Ev Idx": number}
        shapes = {"Input Dims": [[4096, 1024], [1024, 4096]], "Input type": ["float", "float"]}
        yield _complete("cpu_op", name, begin, span * 0.9, {"External id": number, **sizes, **shapes})
        about: dict[str, Any] = {
            "device": 0,
            "context": 1,
            "stream": 7,
            "correlation": number,
            "registers per thread": 128,
        }
        about |= {"grid": [128, 16, 1], "block": [256, 1, 1], "warps per SM": 8.5, "est. achieved occupancy %": 50}
        yield _complete("kernel", "ampere_sgemm_128x64_tn", begin + 500, span * 0.8, about)
    for number in range(20):
        begin = at + 100_000 + number * 6_000
        about = {"stream": 20, "In msg nelems": 1_000_000, "dtype": "Float", "Group size": 2}
        yield _complete("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin, 5_000, about)
    yield _complete("user_annotation", f"ProfilerStep#{step}", at, _STEP_MICROSECONDS - 1, {})
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    yield _complete("user_annotation", loader, at, 5_000, {})
    yield _complete("user_annotation", "Optimizer.step#SGD.step", at + 230_000, 15_000, {})


def _complete(kind: str, name: str, begin: float, took: float, about: dict[str, Any]) -> str:
    times = {"ts": round(begin, 3), "dur": round(took, 3)}
    event = {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 4711,
        "tid": about.get("stream", 1),
        **times,
        "args": about,
    }
    return "  " + json.dumps(event).replace(', "ts"', ',\n    "ts"').replace(', "args"', ',\n    "args"')


def write(path: Path, most_bytes: int) -> tuple[int, int]:
    """Write a trace of about so many bytes; return bytes of text and events."""
    head = '{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n'
    tail = '\n], "baseTimeNanoseconds": 1700000000000000000}\n'
    done = count = step = 0
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as file:
        done += file.write(head)
        while done < most_bytes:
            many = list(kineto(step))
            done += file.write((",\n" if step else "") + ",\n".join(many))
            count, step = count + len(many), step + 1
        done += file.write(tail)
    return done, count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--gzip", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / ("trace.json.gz" if options.gzip else "trace.json")
        nbytes, events = write(path, options.megabytes * 1_000_000)
        command = [sys.executable, "-m", "farandole", "import", str(path), "-o", str(Path(directory) / "run")]
        begin = time.perf_counter()
        importing = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(importing.pid, 0)  # of this child alone
        seconds = time.perf_counter() - begin
        importing.returncode = os.waitstatus_to_exitcode(status)
    result = {
        "gzip": options.gzip,
        "text_megabytes": round(nbytes / 1e6, 1),
        "events": events,
        "exit_code": importing.returncode,
        "peak_resident_megabytes": round(usage.ru_maxrss * 1024 / 1e6, 1),
        "seconds": round(seconds, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

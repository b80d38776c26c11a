"""What reading a very long run costs: seconds and memory of each command that reads run directories.

python benchmarks/long_run_report.py --events 10000000 --ranks 8

An event is a phase, a bucket or a step. The directory is made first, several times as long as what the recorder
would keep of a run (`observe.thinning`) if need be: it is what the readers must bear.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import FARANDOLE, read_options

BUCKETS = 10
PHASES = ("data", "forward", "loss", "backward", "optimizer")
EVENTS_A_STEP = BUCKETS + len(PHASES) + 1
STEP_SECONDS = 0.1


def write_run(directory: Path, events: int, ranks: int) -> int:
    """Write a run of about so many events; return how many bytes it has."""
    directory.mkdir(parents=True)
    facts = {"version": 1, "size": ranks, "hosts": ["node-a"], "command": ["python", "train.py"]}
    (directory / "run.json").write_text(json.dumps(facts))
    steps = max(1, events // (ranks * EVENTS_A_STEP))
    nbytes = 0
    for rank in range(ranks):
        path = directory / f"events-rank{rank}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(_started(rank, ranks)) + "\n")
            tail = json.dumps(_step(rank), separators=(",", ":"))[1:]
            for step in range(1, steps + 1):
                file.write(f'{{"step":{step},"begin":{100 + STEP_SECONDS * step:.6f},{tail}\n')
        nbytes += path.stat().st_size
    return nbytes


def _started(rank: int, ranks: int) -> dict[str, Any]:
    return {
        "version": 2, "rank": rank, "size": ranks, "host": "node-a", "process_id": 1, "generation": 0,
        "begin_seconds": 100.0, "wall_time": "2026-01-01T00:00:00", "clock": "a clock",
    }  # fmt: skip


def _step(rank: int) -> dict[str, Any]:
    """Return what is alike in all steps of a rank: computing 80 of 100 ms, its buckets on the wire meanwhile."""
    bounds = [0, 5_000, 30_000, 31_000, 80_000 + 100 * rank, 88_000]
    phases = [[name, begin, end] for name, begin, end in zip(PHASES, bounds, bounds[1:], strict=False)]
    buckets = [
        [4 << 20, 4 << 20, at, at + 3_000, at + 3_000, at + 3_100, at + 6_000, 2_000, 500, 2]
        for at in range(40_000, 40_000 + 4_000 * BUCKETS, 4_000)
    ]
    exchange = {"wait": [88_000, 95_000], "sent": BUCKETS << 22, "buckets": buckets}
    return {"us": 99_000, "samples": 32, "phases": phases, "exchanges": [exchange], "loss": 1.5}


def measure(arguments: list[str]) -> dict[str, Any]:
    """Run a command of farandole; return its seconds, its largest memory and its exit code."""
    begin = time.perf_counter()
    process = subprocess.Popen([*FARANDOLE, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None, "it was asked for"
    said = process.stderr.read().decode(errors="replace")
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "command": " ".join(arguments[:1] + [word for word in arguments[1:] if word.startswith("--")]),
        "exit_code": process.returncode,
        "seconds": round(time.perf_counter() - begin, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "most_resident_bytes": usage.ru_maxrss * 1024,
        "last_words": said.strip().splitlines()[-1:],
    }


def main() -> None:
    options = read_options(
        __doc__,
        events=10_000_000,
        ranks=8,
        only=([str], "of the commands, those whose name begins so"),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "long"
        nbytes = write_run(run, options.events, options.ranks)
        print(json.dumps({"events": options.events, "ranks": options.ranks, "run_bytes": nbytes}), flush=True)
        out = str(Path(folder) / "out")
        commands = [
            ["report", str(run), "-o", out + ".html"],
            ["diagnose", str(run)],
            ["compare", str(run), str(run)],
            ["export", str(run), "-o", out + ".prom", "--to", "prometheus"],
            ["export", str(run), "-o", out + ".json.gz", "--to", "chrome"],
            ["export", str(run), "-o", out + "-tensorboard", "--to", "tensorboard"],
        ]
        for command in commands:
            if not options.only or any(" ".join(command).startswith(name) for name in options.only):
                print(json.dumps(measure(command)), flush=True)


if __name__ == "__main__":
    main()

"""What the benchmarks share: options, ranks and workers that they start, turns and medians, and what they print.

`python benchmarks/x.py` finds this file beside the script, workers find it by PYTHONPATH. It imports torch in
functions that need it: scripts that make emulated hosts fork, and may have one thread. Models are in `models.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from farandole.bench.intervals import paired_ratio
from farandole.bench.launch_ranks import Hosts, run_on_hosts
from farandole.core.host.process_status import M_MMAP_THRESHOLD, peak_resident_bytes

ROOT = Path(__file__).resolve().parents[1]
FARANDOLE = (sys.executable, "-m", "farandole")
NEXT_HEADING = "\n## "
Run = dict[str, Any]
"""What a run found, or a row of a result, as JSON has it."""
Key = TypeVar("Key")
Value = TypeVar("Value")


# Options.


def make_parser(about: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser that shows `about` as it stands, with an option for each keyword.

    `samples=9` is `--samples`, an integer, and 9 where it is not given; `samples=(9, "of each")` has a help text
    too, and `(9, "of each", [9, 18])` choices. False is a switch, and a list takes several values. Of a type, or a
    list with a type, the value is None where it is not given.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in options.items():
        default, text, choices, *_ = (*given, None, None) if isinstance(given, tuple) else (given, None, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        nargs, first = ("+", default[0]) if isinstance(default, list) else (None, default)
        kind, default = (first, None) if isinstance(first, type) else (type(first), default)
        parser.add_argument(flag, type=kind, default=default, nargs=nargs, choices=choices, help=text)
    return parser


def read_options(about: str | None, **options: Any) -> argparse.Namespace:
    """Return the command line's options: see `make_parser`."""
    return make_parser(about, **options).parse_args()


# Starting ranks and workers.


def is_main() -> bool:
    """Return whether this process is rank 0, or no rank of a job."""
    return os.environ.get("RANK", "0") == "0"


def run_on_ranks(ranks: int, *options: str) -> None:
    """Run this script, with its arguments, on so many ranks of this machine; end with their exit code.

    `options` are those of `farandole run`. On a rank it returns at once.
    """
    if "FARANDOLE_RANK" in os.environ:
        return
    with tempfile.TemporaryDirectory() as place:
        launch = [*FARANDOLE, "run", "-np", str(ranks), "--no-bind", "--run-dir", f"{place}/run", *options]
        done = subprocess.run([*launch, "--", sys.executable, *sys.argv], check=False)
    sys.exit(done.returncode)


def make_importable(*folders: Path | str) -> None:
    """Let processes that are started from here import the files of these folders, and of this one."""
    known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    found = [str(Path(folder).resolve()) for folder in (Path(__file__).parent, *folders)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*(each for each in found if each not in known), *known])


def run_workers(hosts: Hosts, worker: str, words: Sequence[str], **more: Any) -> Run:
    """Run a script of this folder on every rank of `hosts`; return what its rank 0 wrote, see `write_found`.

    `more` goes to `run_on_hosts` of the product.
    """
    make_importable()
    return run_on_hosts(hosts, worker, words, say=say, **more)


def worker_parser(about: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return the parser of such a script: `make_parser` with what `run_on_hosts` adds."""
    return make_parser(about, loopback=False, output=Path, **options)


def write_found(found: Any, options: argparse.Namespace) -> None:
    """Write what a worker found as JSON, on rank 0."""
    if is_main():
        options.output.write_text(json.dumps(found))


# Turns and seconds.


def take_turns(
    calls: Mapping[Key, Callable[[], Value]], rounds: int, *, warm_up: int = 1
) -> dict[Key, list[Value]]:
    """Return what each call returned in each round: in turns A B C, C B A, and so on.

    `warm_up` rounds before these are not counted.
    """
    found: dict[Key, list[Value]] = {name: [] for name in calls}
    for number in range(-warm_up, rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            value = calls[name]()
            if number >= 0:
                found[name].append(value)
    return found


def timed(
    call: Callable[[], object],
    repeats: int = 1,
    *,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """Return a function that returns the seconds of a call, the mean of `repeats`; `before` is not in them."""

    def measure() -> float:
        if before is not None:
            before()
        begin = clock()
        for _ in range(repeats):
            call()
        return (clock() - begin) / repeats

    return measure


def seconds_of(call: Callable[[], object], times: int) -> list[float]:
    """Return the seconds of each of so many calls in a row."""
    measure = timed(call)
    return [measure() for _ in range(times)]


def of_slowest(values: Iterable[float]) -> list[float]:
    """Return of each value that of the rank where it is largest; all ranks call it."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return list(tensor.tolist())


def slowest_in_turns(
    calls: Mapping[Key, Callable[[], object]], rounds: int, *, steps: int = 1, repeats: int = 1, warm_up: int = 1
) -> dict[Key, list[float]]:
    """Return the seconds of each call on the rank that took longest, in order of time.

    Turns and `warm_up` are those of `take_turns`. A turn is `steps` figures, each the mean of `repeats` calls in a
    row, which all ranks begin together.
    """
    import torch.distributed as dist

    def turn(call: Callable[[], object]) -> Callable[[], list[float]]:
        measure = timed(call, repeats, before=dist.barrier)
        return lambda: [measure() for _ in range(steps)]

    found = take_turns({name: turn(call) for name, call in calls.items()}, rounds, warm_up=warm_up)
    return {name: of_slowest(chain.from_iterable(turns)) for name, turns in found.items()}


def alone(step: Callable[[], None], rounds: int, world: Any) -> list[float]:
    """Return the seconds of steps of rank 0; the others wait for a key of the store, without computing."""
    seconds: list[float] = []
    topic = world.topic("alone")
    if world.rank == 0:
        step()
        seconds = seconds_of(step, rounds)
        world.store.set(topic, "over")
    world.store.wait([topic])
    return seconds


# Figures.


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, list[float]]:
    """Return the median of a / b, neighbours in time, and its 95 % bootstrap interval."""
    ratio, interval = paired_ratio(a, b)
    return round(ratio, 4), [round(bound, 4) for bound in interval]


def median_ms(seconds: Iterable[float], digits: int = 1) -> float:
    """Return the median of seconds in milliseconds."""
    return round(1e3 * statistics.median(seconds), digits)


def medians_ms(times: Mapping[str, Iterable[float]], digits: int = 1) -> dict[str, float]:
    """Return the median of each in milliseconds, from seconds."""
    return {name: median_ms(seconds, digits) for name, seconds in times.items()}


def link_seconds(byte_count: float, gigabits: float) -> float:
    """Return the time in which a link of so many gigabits a second carries the bytes, without headers."""
    return 8e-9 * byte_count / gigabits


def stage_3_bound_ms(parameters: float, hosts: int, gigabits: float) -> float:
    """Return the least that links need for a step of ZeRO stage 3 in float32, in milliseconds.

    Every parameter is gathered twice and its gradient scattered once; a host sends what others have not.
    """
    return round(1e3 * link_seconds(3 * parameters * 4 * (hosts - 1) / hosts, gigabits), 1)


def peak_bytes_from_now() -> Callable[[], int]:
    """Return a function that says how far this process's resident memory rose above that of now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now

    def peak() -> int:
        found = peak_resident_bytes()
        assert found is not None, "the kernel says it"
        return found

    before = peak()
    return lambda: peak() - before


def give_back_large_blocks() -> int:
    """Let each block from here on that is larger go back to the kernel when it is freed; return the bytes."""
    least = 65536
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, least), "glibc's malloc takes the option"
    return least


# What is printed and written.


def say(line: str) -> None:
    """Tell the progress, on stderr."""
    sys.stderr.write(f"{line}\n")


def report(found: Mapping[str, Any], *, indent: int | None = None, out: Path | None = None) -> None:
    """Print what was found as JSON, with the machine and the date, on rank 0; write it to `out`, too."""
    import torch

    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if "jobs" not in found:  # whose ranks this process has started
        machine += f", {os.environ.get('WORLD_SIZE', '1')} rank(s), {torch.get_num_threads()} thread(s) each"
    whole = {**found, "machine": machine, "date": date.today().isoformat()}
    if is_main():
        print(json.dumps(whole, indent=indent), flush=True)
        if out is not None:
            out.write_text(json.dumps(whole, indent=1) + "\n")


def markdown(head: str, rows: Iterable[Sequence[object]], right: Collection[int] = ()) -> str:
    """Return a table in Markdown, its head given as it stands there; columns `right` are aligned to the right."""
    marks = ["--:" if number in right else "---" for number in range(1 + head.count("|"))]
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {head} |", f"|{'|'.join(marks)}|", *lines])


def write_figures(page: Path, opening: str, closing: str, figures: str) -> None:
    """Replace what stands on a page between two lines; after the last heading it is all that follows."""
    before, found, rest = page.read_text().partition(opening)
    _, ended, after = rest.partition(closing)
    if not found or not (ended or closing == NEXT_HEADING):
        raise SystemExit(f"{page} has no lines {opening!r} and {closing!r}: expected around the figures")
    page.write_text(f"{before}{opening}\n{figures}\n{ended}{after}")

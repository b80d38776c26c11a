"""One rank of ``farandole measure``: all phases in turn; rank 0 reports progress, and the cluster as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...comm.device.accelerator import synchronize
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster import Cluster, Coefficient
from ...core.host.process_status import CoreTime, busy_machines
from ...core.vocabulary.units import format_seconds
from ...train.session import init, shutdown
from ..machine import machine_facts
from .compute import measure_codec_costs, measure_device
from .exchanges import SIZES, Run, elements_of, measure_tiers, open_tiers
from .rounds import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    SHARES,
    Case,
    PhaseBudget,
    affordable,
    barrier,
    rate_figure,
    sample,
    slowdown_figure,
    slowest,
)

_OVER = 0.05
"""A share of the time that is not worth a word."""


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--disk", required=True, help="folder whose disk is measured")
    options = parser.parse_args()
    world = init(progress=False)
    cluster = measure(world, options.name, options.disk, options.seconds)
    if world.rank == 0:
        _say({"result": dataclasses.asdict(cluster)})
    shutdown()


def measure(world: World, name: str, directory: str, seconds: float) -> Cluster:
    """Return what this world gives; called by all ranks. All phases together take about `seconds`.

    Raises:
        ConfigError: the hosts have different numbers of ranks; on all ranks.
    """
    tiers = open_tiers(world)
    phases = _Phases(world, [each for each in SHARES if each != "overlap" or world.size > 1], seconds)
    begin = CoreTime.now()
    device, speeds = measure_device(world, phases.begin("compute"))
    facts: dict[str, Any] = {}
    costs = measure_tiers(world, tiers, phases.begin("collectives"))
    if world.size > 1:
        outer = tiers[-1]
        slowdowns = measure_overlap(world, outer.runs["all_reduce"], outer.width, phases.begin("overlap"))
        facts["compute_slowdown"], facts["exchange_slowdown"] = slowdowns
    facts["codecs"] = measure_codec_costs(world, phases.begin("codecs"))
    facts["loader_bytes_per_second"] = measure_loader(world, phases.begin("loader"))
    written, read = measure_disk(world, directory, phases.begin("disk"))
    phases.end()
    own = dataclasses.asdict(CoreTime.now().since(begin))
    busy = busy_machines([CoreTime(**each) for each in all_gather_json(world, "measure/busy", own)])
    return Cluster(
        name=name,
        device=device,
        tiers=costs,
        disk_write_bytes_per_second=written,
        disk_read_bytes_per_second=read,
        rank_speeds=speeds,
        fingerprint={**fingerprint(world), **({"busy": busy} if busy else {})},
        **facts,
    )


def fingerprint(world: World) -> dict[str, str]:
    """Return what was measured, and with what. Called by all ranks."""
    hosts = list(dict.fromkeys(all_gather_json(world, "measure/hosts", world.host)))
    facts = machine_facts()
    return {
        "date": facts["when"],
        "hosts": ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""),
        "ranks": str(world.size),
        "processor": facts["processor"],
        "cores": str(facts["cores"]),
        "threads": str(torch.get_num_threads()),
        "backend": world.backend,
        "farandole": facts["versions"]["farandole"],
        "torch": facts["versions"]["torch"],
        "load": str(facts["load"][0]),
    }


class _Phases:
    """The time of each phase, and lines of rank 0 that name it. See [Note: all ranks decide alike]."""

    def __init__(self, world: World, names: Sequence[str], seconds: float) -> None:
        self._world, self._seconds, self._begin_seconds = world, seconds, time.monotonic()
        self._budget = PhaseBudget(names, seconds, agree=self._of_first)

    def begin(self, phase: str) -> float:
        """Return the seconds of `phase`, which begins."""
        passed = time.monotonic() - self._begin_seconds
        self._show(f"measuring {phase}: {format_seconds(passed)} of about ")
        return self._budget.begin(phase)

    def end(self) -> None:
        """Report if the phases took longer than they were given: fewer rounds than they made there are not."""
        over = -self._budget.left_seconds
        if over > _OVER * self._seconds:
            self._show(f"the fewest rounds of all phases took {format_seconds(over)} more than was left of ")

    def _show(self, text: str) -> None:
        if self._world.rank == 0:
            _say({"progress": text + format_seconds(self._seconds)})

    def _of_first(self, value: float) -> float:
        """Return the value of rank 0."""
        return float(all_gather_json(self._world, "measure/budget", value)[0])


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


# By how much computation and exchanges slow each other down: each alone, then both at once.


_SIDE = 256
_FEWEST_EXCHANGES, _MOST_EXCHANGES = 2, 200


def measure_overlap(world: World, run: Run, width: int, seconds: float) -> tuple[Coefficient, Coefficient]:
    """Return the slow-down of computation and of the exchange `run`, an all-reduce among `width` ranks.

    Called by all ranks. An exchange is of 2 MiB, or of less where the link is slow.
    """
    begin = time.monotonic()
    multiply = _products(world.device)
    tensor, count = _load(world, run, width, multiply, seconds / (LEAST_ROUNDS + 1))
    compute_alone: list[float] = []
    compute_both: list[float] = []
    exchange_alone: list[float] = []
    exchange_both: list[float] = []
    for done in range(1, MOST_ROUNDS + 1):
        round_begin = time.monotonic()
        rows = all_gather_json(world, "measure/overlap", _round(world, run, tensor, count, multiply))
        slowest = [max(column) for column in zip(*rows, strict=True)]
        for values, value in zip(
            (exchange_alone, exchange_both, compute_alone, compute_both), slowest, strict=True
        ):
            values.append(value)
        now = time.monotonic()
        wanted = _next_count(count, done, now - begin, now - round_begin, seconds)
        count = int(all_gather_json(world, "measure/overlap goes on", wanted)[0])
        if not count:
            break
    return slowdown_figure(compute_both, compute_alone), slowdown_figure(exchange_both, exchange_alone)


def _next_count(count: int, done: int, passed: float, took: float, seconds: float) -> int:
    """Return how many exchanges the next round makes, fewer where rounds take too long; 0: the time is over.

    Args:
        count: of the last round.
        done: rounds, at least 1.
        passed: seconds of all of it so far.
        took: seconds of the last round.
        seconds: for all of it.
    """
    if done >= LEAST_ROUNDS and passed * (done + 1) / done > seconds:
        return 0
    allowed = (seconds - passed) / max(1, LEAST_ROUNDS - done)
    return min(count, max(_FEWEST_EXCHANGES, int(count * allowed / max(took, 1e-9))))


def _load(
    world: World, run: Run, width: int, multiply: Callable[[], None], seconds: float
) -> tuple[torch.Tensor, int]:
    """Return what to exchange, and how often in a round of about `seconds`: the same on all ranks.

    Beside computation an exchange may take many times as long, and not each alike: so short rounds are made, until
    one is long enough to tell.
    """
    for nbytes in reversed(SIZES[:-1]):
        tensor = torch.zeros(elements_of(nbytes, width), dtype=torch.float32, device=world.device)
        run(tensor)
        barrier(world)
        once = max(all_gather_json(world, "measure/once", _exchanges(run, tensor, 1)))
        if 12 * once <= seconds:
            break
    count = _FEWEST_EXCHANGES
    while True:
        begin = time.perf_counter()
        _round(world, run, tensor, count, multiply)
        took = max(all_gather_json(world, "measure/round of overlap", time.perf_counter() - begin))
        if took >= seconds / 8 or count == _MOST_EXCHANGES:
            return tensor, min(_MOST_EXCHANGES, max(_FEWEST_EXCHANGES, int(count * seconds / took)))
        count = min(_MOST_EXCHANGES, 4 * count)


def _round(
    world: World, run: Run, tensor: torch.Tensor, count: int, multiply: Callable[[], None]
) -> tuple[float, float, float, float]:
    """Return the seconds of all exchanges, alone and beside products, and of one product, alone and beside."""
    barrier(world)
    alone = _exchanges(run, tensor, count)
    barrier(world)
    product = _count_until(multiply, time.perf_counter() + alone)
    barrier(world)
    both, product_both = _together(run, tensor, count, multiply)
    return alone, both, product, product_both


def _products(device: torch.device) -> Callable[[], None]:
    left = torch.randn(_SIDE, _SIDE, dtype=torch.float32, device=device)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, left, out=out)
        synchronize(device)

    return multiply


def _exchanges(run: Run, tensor: torch.Tensor, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        run(tensor)
    synchronize(tensor.device)
    return time.perf_counter() - begin


def _count_until(multiply: Callable[[], None], end: float) -> float:
    """Return the seconds of one product, made until `end` of `perf_counter`."""
    begin, done = time.perf_counter(), 0
    while not done or time.perf_counter() < end:
        multiply()
        done += 1
    return (time.perf_counter() - begin) / done


def _together(run: Run, tensor: torch.Tensor, count: int, multiply: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of all exchanges, made by another thread, and of one product meanwhile."""
    taken: list[float] = []
    failures: list[BaseException] = []

    def exchange() -> None:
        try:
            taken.append(_exchanges(run, tensor, count))
        except BaseException as problem:  # raised again in the main thread
            failures.append(problem)

    thread = threading.Thread(target=exchange, name="farandole-measure-exchange", daemon=True)
    begin, done = time.perf_counter(), 0
    thread.start()
    while not done or thread.is_alive():
        multiply()
        done += 1
    each = (time.perf_counter() - begin) / done
    thread.join()
    if failures:
        raise failures[0]
    return taken[0], each


# What a loader's worker and the disk give, on all ranks at once.


_SAMPLE_SHAPE = (3, 64, 64)
_BATCH = 32
_BATCHES = 16
_FILE_BYTES = (1 * 2**20, 4 * 2**20, 16 * 2**20)
_PIECE_BYTES = 2**20
_FAILED = 1e9
"""Seconds of what could not be done."""


class _Samples(Dataset[torch.Tensor]):
    """Images in memory; a worker copies and normalises each."""

    def __init__(self) -> None:
        self._images = torch.zeros(256, *_SAMPLE_SHAPE, dtype=torch.float32)

    def __len__(self) -> int:
        """How many there are in one pass."""
        return _BATCH * _BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one image."""
        return (self._images[index % len(self._images)] - 0.5) / 0.25


def measure_loader(world: World, seconds: float) -> Coefficient:
    """Return bytes per second of batches that one worker process makes of images in memory.

    Called by all ranks, whose workers work at the same time.
    """
    loader = DataLoader(_Samples(), batch_size=_BATCH, num_workers=1)

    def measure(_: int) -> float:
        begin, count = 0.0, 0
        for number, _batch in enumerate(loader):
            begin = time.perf_counter() if number == 1 else begin  # the worker is at work
            count = number
        return (time.perf_counter() - begin) / max(1, count - 1)

    nbytes = 4.0 * _BATCH * torch.Size(_SAMPLE_SHAPE).numel()
    return rate_figure(nbytes, slowest(sample(world, [Case("loader", nbytes, measure)], seconds)[0]))


def measure_disk(world: World, directory: str, seconds: float) -> tuple[Coefficient | None, Coefficient | None]:
    """Return bytes per second that a rank writes (with fsync) and reads, while all ranks do. Called by all ranks.

    In a folder that is removed, inside of `directory` where this host has it, else where temporary files are. None
    where some rank cannot write.
    """
    folder = _own_folder(directory)
    try:
        if any(all_gather_json(world, "measure/disk", folder is None)) or folder is None:
            return None, None
        path = folder / "measured"
        written = [Case("write", float(size), partial(_write, path, size)) for size in _FILE_BYTES]
        write = affordable(world, written, 0.3 * seconds)[-1]
        write.repeats = 1
        read = Case("read", write.work, partial(_read, path))
        # The last is measured first: there is a file to read.
        read_times, write_times = (slowest(each) for each in sample(world, [read, write], 0.7 * seconds))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if _FAILED in (*read_times, *write_times):
        return None, None
    return rate_figure(write.work, write_times), rate_figure(write.work, read_times)


def _own_folder(directory: str) -> Path | None:
    """Return a new folder of this rank alone; None where none can be made."""
    for place in (directory, None):
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=".farandole-measure-", dir=place))
    return None


def _write(path: Path, size: int, _: int) -> float:
    """Return the seconds of writing a file down to the disk; `_FAILED` where it is full."""
    piece = os.urandom(min(size, _PIECE_BYTES))
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(size // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return _FAILED
    return time.perf_counter() - begin


def _read(path: Path, _: int) -> float:
    """Return the seconds of reading the file, which the page cache has forgotten where the kernel obeys."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return _FAILED
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while os.read(descriptor, _PIECE_BYTES):
            pass
        return time.perf_counter() - begin
    except OSError:
        return _FAILED
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()

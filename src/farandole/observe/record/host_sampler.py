"""What the host and this process are doing, about once a second: read from the kernel at the end of a step.

No thread: a step longer than a second is one sample. What a system does not tell is None. An accelerator is asked
through nvidia-ml-py, where that is installed; else through what the caller has.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import linecache
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...core.host.process_status import peak_resident_bytes, resident_bytes
from ...core.host.stacks import StackFrame, stack_of
from ...core.vocabulary.events import GARBAGE_COLLECTION, SETUP_THREAD, Event, Phase, Sample, Setup, StepDone

# CPU time of this process's other Python threads, and of its children.
#
# While a Python thread computes, the training thread may wait for the GIL. Threads of this package and those
# that no Python code runs on (of torch's operations) are left out. Children are the workers of a loader, as a
# rule.

_OURS = "farandole"
_TASKS = Path("/proc/self/task")
_STARTERS = ("/threading.py", "/concurrent/futures/thread.py")


def thread_seconds() -> dict[int, float]:
    """Return the CPU time of each so far, by the kernel's number; nothing where the kernel does not tell."""
    found = {}
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.native_id is None or thread.name.startswith(_OURS):
            continue
        with suppress(OSError, IndexError):  # one that has ended meanwhile
            fields = (_TASKS / str(thread.native_id) / "schedstat").read_text().split()
            found[thread.native_id] = int(fields[0]) / 1e9
    return found


def children_seconds() -> dict[int, float]:
    """Return the CPU time of each child so far, by its number; nothing where the kernel does not tell."""
    numbers: list[str] = []
    for task in _TASKS.glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            numbers += task.read_text().split()
    found = {}
    for number in numbers:
        with suppress(OSError, IndexError):  # a child that has
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            found[int(number)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def place_of(number: int) -> str:
    """Return what a thread runs, as "function at file.py:line"; empty if it has ended."""
    thread = next((each for each in threading.enumerate() if each.native_id == number), None)
    if thread is None or thread.ident is None:
        return ""
    frames = [each for each in stack_of(thread.ident) if not each.file.endswith(_STARTERS)]
    if not frames:
        return ""
    outermost = frames[-1]  # what the thread was started for
    return f"{outermost.function} at {Path(outermost.file).name}:{_begin_of(outermost)}"


def _begin_of(place: StackFrame) -> int:
    """Return the line in which a function begins; that which it is in, where its file does not tell."""
    begin = f"def {place.function}("
    lines = linecache.getlines(place.file)[: place.line]
    return next((n for n in range(len(lines), 0, -1) if lines[n - 1].lstrip().startswith(begin)), place.line)


# Pauses of Python's garbage collector, as phases.

LEAST_SECONDS = 0.0005
"""Shorter collections are the young generation's, several a step, and cost nothing worth a record."""


class GarbageWatch:
    """Hands collections to `record` from `open` to `close`. All threads of the process stand still meanwhile."""

    def __init__(self, record: Callable[[Phase], None]) -> None:
        self._record = record
        self._begin_seconds = 0.0

    def open(self) -> None:
        """Begin to watch."""
        gc.callbacks.append(self._called)

    def close(self) -> None:
        """Stop watching; may be called twice."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, phase: str, _: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._begin_seconds = now
        elif now - self._begin_seconds >= LEAST_SECONDS:
            self._record(Phase(GARBAGE_COLLECTION, self._begin_seconds, now))


EVERY_SECONDS = 1.0
_BUSY_THREAD = 0.2
"""CPU seconds a second from which a thread is told of."""
_PROC = Path("/proc")
_INTERFACES = Path("/sys/class/net")
_SWAP_COUNTERS = ("pswpin", "pswpout")


class AcceleratorFigures(Protocol):
    """What tells of one accelerator."""

    def read(self) -> tuple[float | None, int | None, int | None]:
        """Return (share of the time it ran something, bytes used, bytes in all); None for what it does not say."""

    def close(self) -> None:
        """Let go of it."""


class HostSampling:
    """A recorder that hands a `Sample` to `record` at the ends of steps, when one is due."""

    def __init__(
        self,
        record: Callable[[Sample | Setup], None],
        gpu: AcceleratorFigures | None = None,
        *,
        every_seconds: float = EVERY_SECONDS,
        peak_bytes: Callable[[], int | None] = peak_resident_bytes,
    ) -> None:
        self._record = record
        self._gpu = gpu
        self._peak_bytes = peak_bytes
        self._every = every_seconds
        self._process = os.getpid()
        self._before = _Counters.read()
        self._place = ""

    def record(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, StepDone) or event.end_seconds - self._before.at_seconds < self._every:
            return
        if os.getpid() != self._process:
            return
        before, self._before = self._before, _Counters.read()
        sample = replace(self._before.since(before, self._gpu), peak_bytes=self._peak_bytes())
        if sample.thread_cores is not None and sample.thread_cores > _BUSY_THREAD:
            self._tell_place(before)
        self._record(sample)

    def _tell_place(self, before: _Counters) -> None:
        place = place_of(self._before.busiest_thread_since(before)[0])
        if place and place != self._place:
            self._place = place
            self._record(Setup({SETUP_THREAD: place}))

    def close(self) -> None:
        """Let go of the accelerator."""
        if self._gpu is not None:
            self._gpu.close()


class _Counters:
    """Counters of the process and the machine at one moment; None where the system has none."""

    def __init__(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.at_seconds = time.monotonic()
        self.process_seconds = usage.ru_utime + usage.ru_stime
        self.major_faults = usage.ru_majflt
        self.preemptions = usage.ru_nivcsw
        self.machine_busy, self.machine_all = _machine_ticks()
        self.swapped_pages = _swapped_pages()
        self.interfaces = _interface_bytes()
        self.core_wait_nanoseconds = _core_wait_nanoseconds()
        self.thread_seconds = thread_seconds()
        self.children_seconds = children_seconds()

    @classmethod
    def read(cls) -> _Counters:
        return cls()

    def since(self, before: _Counters, gpu: AcceleratorFigures | None) -> Sample:
        span = max(self.at_seconds - before.at_seconds, 1e-9)
        ticks = _difference(self.machine_all, before.machine_all)
        busy = _difference(self.machine_busy, before.machine_busy)
        waited = _difference(self.core_wait_nanoseconds, before.core_wait_nanoseconds)
        pages = _difference(self.swapped_pages, before.swapped_pages)
        share, used, total = gpu.read() if gpu is not None else (None, None, None)
        sent, received = self._network_since(before)
        return Sample(
            self.at_seconds,
            span,
            process_cores=(self.process_seconds - before.process_seconds) / span,
            machine_share=busy / ticks if busy is not None and ticks else None,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            resident_bytes=resident_bytes(),
            available_bytes=_available_bytes(),
            swapped_bytes=None if pages is None else pages * resource.getpagesize(),
            major_faults=self.major_faults - before.major_faults,
            preemptions=self.preemptions - before.preemptions,
            network_sent_bytes=sent,
            network_received_bytes=received,
            gpu_share=share,
            gpu_used_bytes=used,
            gpu_total_bytes=total,
            core_wait_share=None if waited is None else waited / 1e9 / span,
            link_bits_per_second=self._link_since(before),
            thread_cores=self.busiest_thread_since(before)[1] / span if self.thread_seconds else None,
            children_cores=self._children_since(before) / span if self.children_seconds else None,
        )

    def _children_since(self, before: _Counters) -> float:
        then = before.children_seconds
        return sum(max(0.0, now - then.get(number, 0.0)) for number, now in self.children_seconds.items())

    def busiest_thread_since(self, before: _Counters) -> tuple[int, float]:
        """Return the number and the CPU seconds of the other Python thread that computed most since then."""
        spent = [(at - before.thread_seconds.get(n, 0.0), n) for n, at in self.thread_seconds.items()]
        seconds, number = max(spent, default=(0.0, 0))
        return number, max(0.0, seconds)

    def _network_since(self, before: _Counters) -> tuple[int | None, int | None]:
        """Return (sent, received) since then over all interfaces."""
        if self.interfaces is None or before.interfaces is None:
            return None, None
        sent, received = (
            max(0, sum(b[way] for b in self.interfaces.values()) - sum(b[way] for b in before.interfaces.values()))
            for way in (0, 1)
        )
        return sent, received

    def _link_since(self, before: _Counters) -> float | None:
        """Return the speed of the interface that has sent most since then."""
        then = before.interfaces or {}
        sent = {name: now[0] - then.get(name, now)[0] for name, now in (self.interfaces or {}).items()}
        busiest = max(sent, key=lambda name: sent[name], default="")
        return _speed(busiest) if sent.get(busiest, 0) > 0 else None


class GpuFacts:
    """What one accelerator says of itself."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> tuple[float | None, int | None, int | None]:
        """See `AcceleratorFigures`."""
        share = used = total = None
        with contextlib.suppress(self._library.NVMLError):
            share = self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        with contextlib.suppress(self._library.NVMLError):
            memory = self._library.nvmlDeviceGetMemoryInfo(self._handle)
            used, total = int(memory.used), int(memory.total)
        return share, used, total

    def close(self) -> None:
        """Let go of the library."""
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()


def _core_wait_nanoseconds() -> int | None:
    """Return for how long the main thread was ready to run and waited for a core."""
    try:
        return int((_PROC / "self" / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def find_gpu(uuid: str) -> GpuFacts | None:
    """Return the accelerator with this UUID; None where the library or the device is not there."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        library.nvmlInit()
        return GpuFacts(library, library.nvmlDeviceGetHandleByUUID(name.encode()))
    except library.NVMLError:
        return None


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)


def _machine_ticks() -> tuple[int | None, int | None]:
    """Return (busy, all) CPU time of the machine in ticks; waiting for a disk is not busy."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        user, nice, system, idle, waiting, *rest = (int(word) for word in _first_line(_PROC / "stat").split()[1:9])
        busy = user + nice + system + sum(rest)
        return busy, busy + idle + waiting
    return None, None


def _first_line(path: Path) -> str:
    with path.open(encoding="ascii") as file:
        return file.readline()


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), (_PROC / "meminfo").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _swapped_pages() -> int | None:
    """Return the pages moved to and from swap since the machine started."""
    found = 0
    with contextlib.suppress(OSError, ValueError), (_PROC / "vmstat").open(encoding="ascii") as file:
        for line in file:
            if line.startswith(_SWAP_COUNTERS):
                found += int(line.split()[1])
        return found
    return None


def _interface_bytes() -> dict[str, tuple[int, int]] | None:
    """Return (sent, received) by interface, without loopback; None where the system does not say."""
    found = {}
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        (_PROC / "net" / "dev").open(encoding="ascii") as file,
    ):
        for line in file:
            name, colon, numbers = line.partition(":")
            if colon and name.strip() != "lo":
                words = numbers.split()
                found[name.strip()] = int(words[8]), int(words[0])
        return found
    return None


def _speed(interface: str) -> float | None:
    """Return the bits a second of an interface; None of one without hardware, whose driver makes a figure up."""
    with contextlib.suppress(OSError, ValueError):
        if (_INTERFACES / interface / "device").exists():
            megabits = int((_INTERFACES / interface / "speed").read_text())
            return megabits * 1e6 if megabits > 0 else None  # -1: unknown
    return None

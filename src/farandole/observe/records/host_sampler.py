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
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...core.host.open_sockets import Key, borrowed, open_sockets
from ...core.host.process_status import interface_bytes, peak_resident_bytes, resident_bytes
from ...core.host.stacks import StackFrame, stack_of
from ...core.vocabulary.events import (
    GARBAGE_COLLECTION,
    SETUP_THREAD,
    Event,
    LinkTraffic,
    Phase,
    Sample,
    Setup,
    StepDone,
    Traffic,
)

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
        self.interfaces = _links()
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


def _links() -> dict[str, tuple[int, int]] | None:
    """Return `interface_bytes` without loopback; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return {name: counted for name, counted in interface_bytes().items() if name != "lo"}
    return None


def _speed(interface: str) -> float | None:
    """Return the bits a second of an interface; None of one without hardware, whose driver makes a figure up."""
    with contextlib.suppress(OSError, ValueError):
        if (_INTERFACES / interface / "device").exists():
            megabits = int((_INTERFACES / interface / "speed").read_text())
            return megabits * 1e6 if megabits > 0 else None  # -1: unknown
    return None


# What goes to other hosts, read from the kernel's own account of this process's connections.
#
# No thread: it is read at the ends of steps, soon, then every few seconds, and at the end. All TCP connections of
# the process are read, of every library (a backend, our transport); those within the host are not. See [Note:
# bytes over busy time] in `timeline_reader`. Linux only: elsewhere nothing is recorded.


TRAFFIC_SECONDS = 2.0
_SOON_SECONDS = 0.5
"""Until the first reading: short runs have one, too."""
MOST_LINKS = 256
"""In one record; those that carried most."""
_LEAST_BYTES = 65536
_FIRST_STEP = 3
"""At whose end counting begins: what went before set up the run."""
# Offsets in Linux's `struct tcp_info`, to which fields are only ever added (uapi/linux/tcp.h; 4.10 and newer).
_ACKNOWLEDGED = struct.Struct("=Q"), 120
_BUSY_AND_CLOSED_WINDOW = struct.Struct("=QQ"), 168
_INFO_BYTES = 184


class _Count(NamedTuple):
    own_address: str
    peer_address: str
    sent_bytes: int
    busy_seconds: float


class TrafficWatch:
    """A recorder that hands `Traffic` to `record` at the ends of steps, when it is due."""

    def __init__(self, record: Callable[[Traffic], None], *, every_seconds: float = TRAFFIC_SECONDS) -> None:
        self._record = record
        self._every = every_seconds
        self._process = os.getpid()
        self._steps = 0
        self._before: dict[Key, _Count] = {}
        self._at_seconds = self._step_end_seconds = 0.0
        self._due_seconds = min(_SOON_SECONDS, every_seconds)

    def record(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, StepDone) or os.getpid() != self._process:
            return
        self._steps += 1
        self._step_end_seconds = event.end_seconds
        if self._steps < _FIRST_STEP:
            return
        if self._steps == _FIRST_STEP:
            self._before, self._at_seconds = read_connections(), event.end_seconds
        elif event.end_seconds - self._at_seconds >= self._due_seconds:
            self._due_seconds = self._every
            self._read(event.end_seconds)

    def _read(self, at_seconds: float) -> None:
        span, self._at_seconds = at_seconds - self._at_seconds, at_seconds
        before, self._before = self._before, read_connections()
        sums: dict[tuple[str, str], tuple[int, float]] = {}
        for key, now in self._before.items():
            then = before.get(key)
            sent, busy = (then.sent_bytes, then.busy_seconds) if then is not None else (0, 0.0)
            link = (now.own_address, now.peer_address)
            so_far = sums.get(link, (0, 0.0))
            sums[link] = (
                so_far[0] + max(0, now.sent_bytes - sent), so_far[1] + max(0.0, now.busy_seconds - busy)
            )  # fmt: skip
        most = sorted(sums.items(), key=lambda item: -item[1][0])[:MOST_LINKS]
        links = tuple(LinkTraffic(*link, *counts) for link, counts in most if counts[0] >= _LEAST_BYTES)
        if links:
            self._record(Traffic(at_seconds, span, links))

    def close(self) -> None:
        """Read what went out since the last reading, and drop all connections."""
        if (
            self._steps > _FIRST_STEP
            and self._step_end_seconds > self._at_seconds
            and os.getpid() == self._process
        ):
            self._read(self._step_end_seconds)
        self._before = {}


def read_connections() -> dict[Key, _Count]:
    """Return what each connection of this process to another host has sent so far."""
    found = {}
    with suppress(OSError):  # a system without /proc
        for key in open_sockets():
            with suppress(OSError, struct.error, ValueError), borrowed(key[0]) as connection:
                count = _count(connection)
                if count is not None:
                    found[key] = count
    return found


def _count(connection: socket.socket) -> _Count | None:
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    own, peer = _address(connection.getsockname()[0]), _address(connection.getpeername()[0])
    if own == peer or ip_address(peer).is_loopback:
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return None
    (sent,) = _ACKNOWLEDGED[0].unpack_from(info, _ACKNOWLEDGED[1])
    busy, closed = _BUSY_AND_CLOSED_WINDOW[0].unpack_from(info, _BUSY_AND_CLOSED_WINDOW[1])
    return _Count(own, peer, sent, max(0, busy - closed) / 1e6)


def _address(text: str) -> str:
    """Return an address without a zone, an IPv4 one as such."""
    address = ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)

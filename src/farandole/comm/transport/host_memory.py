"""The ranks of this host, and memory that all of them map.

[Note: memory without a name] Each rank makes its memory with memfd_create(2). The others open it as
/proc/<process>/fd/<number>, and close that when all have mapped it; the maker keeps its own, to map it anew in
a forked child (`forks.separate_in_child`). The memory has no name in any file system, needs no /dev/shm, and ends
with the last process that maps it, kill -9 or not. Its size is sealed, so that no rank can meet a hole.

[Note: order of memory] Counters and data are read and written with plain loads and stores. That is enough
on x86-64, where a CPU makes its stores visible in program order and does not move a load before an
earlier load (Intel SDM vol. 3, 8.2.2). The exceptions are stores that bypass the caches and fast string
stores: the C library ends the first with a fence, and the second become visible before any later store
(8.2.4). So a rank that sees a counter sees all that was stored before it. An aligned 8-byte store is never
seen in halves (8.1.1). On Arm none of this holds, and `SharedMemory.connect` refuses.

[Note: how to wait] First look a hundred times (about 10 us; a peer that runs on a core of its own is often
there by then; only once where ranks outnumber cores), then yield the core some times, then sleep in the
kernel on the counter of a missing peer (futex(2)). A rank that steps its counter wakes the sleepers, so that
no rank waits longer than it must and no core is taken from ranks that have work to do. The wake-up is a call
into the kernel every time: to skip it when no rank sleeps would need a full fence between the store of the
counter and the look for sleepers, which plain stores do not give. No wake-up is lost: the kernel compares
the counter again before it puts a rank to sleep.

[Note: who is gone] A sleep ends every 20 ms at the latest, to ask the kernel whether a peer's process has
ended (pidfd_open(2): no race with a reused process id). Then the counter is read again, because a peer may
pass its last barrier and exit at once. A peer that leaves in good order says so in its page.

[Note: words] With its counter each rank publishes a word, which says what it is about to do, in one of two
places alternately. After the barrier all compare. The place is written again two barriers later, that is
after all have arrived at the next barrier, so after all have compared.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...core.vocabulary.errors import CommError, Mismatch, PeerLost, Stalled
from ...core.vocabulary.text import name_ranks
from ..world.forks import separate_in_child
from ..world.store_sync import all_gather_json, require_equal
from ..world.world import World

# A barrier among the ranks of one host: counters in shared memory, and a wait that notices death.

PAGE_BYTES = 4096
_COUNT, _WORD, _LEFT = 0, 1, 3  # places in a page, 8 bytes each; the words take two
_LOOKS = 100
_YIELDS = 20
_LOOK_AFTER_PEERS_SECONDS = 0.02
_SAME_CALLS = "the ranks of a host must make the same calls in the same order"
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL = 202, 0, 1, 2**31 - 1  # of x86-64; linux/futex.h


@dataclass(frozen=True)
class Peer:
    """A rank of this host: its rank in the job, where it runs, its process."""

    rank: int
    host: str
    process: int


class HostBarrier:
    """The ranks of one host wait for each other. Not for use by two threads at once."""

    def __init__(
        self, peers: Sequence[Peer], local_rank: int, pages: Sequence[torch.Tensor], timeout_seconds: float
    ) -> None:
        """`peers` and `pages` (uint8, `PAGE_BYTES` each, zeros at first) are by local rank, mine included.

        Raises OSError when the kernel cannot watch a peer's process.
        """
        self._peers = list(peers)
        self._me = peers[local_rank]
        self.timeout_seconds = timeout_seconds
        """How long a wait may be."""
        self._pages = [_as_counters(page) for page in pages]
        self._mine = self._pages[local_rank]
        self._addresses = [page.data_ptr() for page in pages]
        self._my_address = self._addresses[local_rank]
        self._others = [i for i in range(len(peers)) if i != local_rank]
        self._looks = _LOOKS if (os.cpu_count() or 1) >= len(peers) else 1
        self._count = 0
        self.meanwhile: Callable[[], bool] | None = None
        """Called again and again while this rank waits for long; it says whether it had something to do."""
        self._failure: CommError | None = None
        self._system_call = _system_call()
        self._watch = select.poll()
        self._watched: dict[int, int] = {}
        """Local rank by the descriptor of its process."""
        try:
            for i in self._others:
                descriptor = os.pidfd_open(peers[i].process)
                self._watched[descriptor] = i
                self._watch.register(descriptor, select.POLLIN)
        except OSError:
            self._unwatch()
            raise

    def wait(self, word: int, name: Callable[[int], str]) -> None:
        """Return when all ranks of the host are here, with the same `word`; `name` returns a word as text.

        Raises `PeerLost` when a rank ended or left, `Stalled` when one does not come in time, `Mismatch`, on all
        ranks, when words differ. After any of these the barrier raises the same error for good.
        """
        if self._failure is not None:
            raise self._failure
        self._count = count = self._count + 1
        place = _WORD + (count & 1)
        self._mine[place] = word
        self._mine[_COUNT] = count
        self._system_call(_FUTEX, self._my_address, _FUTEX_WAKE, _ALL, None, None, 0)
        for i in self._others:
            page = self._pages[i]
            looks = self._looks
            while page[_COUNT] < count:
                looks -= 1
                if not looks:
                    self._wait_patiently(count, name(word))
                    break
        for i in self._others:
            if self._pages[i][place] != word:
                mine, theirs = name(word), name(self._pages[i][place])
                text = f"rank {self._me.rank} is at {mine}, rank {self._peers[i].rank} at {theirs}"
                self._fail(Mismatch, text, mine, _SAME_CALLS)

    def close(self) -> None:
        """Tell the others that I left. May be called twice."""
        self._mine[_LEFT] = 1
        if self._failure is None:
            self._failure = CommError("it was closed", rank=self._me.rank, operation="shared memory")
        self._unwatch()

    def forget(self) -> None:
        """In a forked child: do not wait, and do not write to the page, which is the parent's."""
        self._failure = CommError("this process was forked", rank=self._me.rank, operation="shared memory")
        self._unwatch()

    def _wait_patiently(self, count: int, operation: str) -> None:
        """See [Note: how to wait]: yield, then sleep until all have arrived."""
        begin = time.monotonic()
        looked_after = begin
        for i in self._others:
            page, address = self._pages[i], self._addresses[i]
            yields = _YIELDS
            while (seen := page[_COUNT]) < count:
                if yields:
                    yields -= 1
                    os.sched_yield()
                    continue
                nap = _SHORT_NAP if self.meanwhile is not None and self.meanwhile() else _NAP
                low = seen & 0xFFFFFFFF
                self._system_call(_FUTEX, address, _FUTEX_WAIT, low, ctypes.byref(nap), None, 0)
                now = time.monotonic()
                if now - looked_after >= _LOOK_AFTER_PEERS_SECONDS:
                    looked_after = now
                    self._look_after_peers(count, operation, now - begin)

    def _look_after_peers(self, count: int, operation: str, waited: float) -> None:
        """Raise when a peer that has not arrived is gone, or when the time is over. See [Note: who is gone].

        Raises also when another thread has closed this barrier meanwhile.
        """
        if self._failure is not None:
            raise self._failure
        ended = {self._watched.get(descriptor) for descriptor, _ in self._watch.poll(0)}
        left = {i for i in self._others if self._pages[i][_LEFT]}
        missing = [i for i in self._others if self._pages[i][_COUNT] < count]
        for gone, what in ((ended, "its process has ended"), (left, "it left")):
            for i in missing:
                if i in gone:
                    peer = self._peers[i]
                    text = f"rank {peer.rank} on {peer.host} is gone: {what}"
                    self._fail(PeerLost, text, operation, f"look for the first failure of rank {peer.rank}")
        if missing and waited >= self.timeout_seconds:
            names = name_ranks(sorted(self._peers[i].rank for i in missing))
            text = f"{names} on {self._me.host} did not get here within {self.timeout_seconds:g} s"
            self._fail(Stalled, text, operation, _SAME_CALLS)

    def _fail(self, kind: type[CommError], text: str, operation: str, remedy: str) -> NoReturn:
        """Raise the error, now and at each later call; mark this rank as gone for ranks that wait for it."""
        self._failure = kind(text, rank=self._me.rank, operation=operation, remedy=remedy)
        self._mine[_LEFT] = 1
        raise self._failure

    def _unwatch(self) -> None:
        while self._watched:
            with suppress(KeyError):  # two threads may close: each descriptor is closed by one of them
                os.close(self._watched.popitem()[0])


def _as_counters(page: torch.Tensor) -> memoryview[int]:
    """Return the page as 8-byte integers: reading one through a tensor costs ten times as much."""
    counters: Any = page.view(torch.int64).numpy()
    return memoryview(counters)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, int(_LOOK_AFTER_PEERS_SECONDS * 1e9))
_SHORT_NAP = _Timespec(0, 500_000)
"""While there is something else to do as well."""


def _system_call() -> Callable[..., int]:
    """Return syscall(2), for futex(2): operands number, address, operation, value, time, address, value.

    A call through ctypes lets other Python threads run meanwhile; an interrupted one returns.
    """
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    found: Callable[..., int] = call
    return found


ALIGNMENT = 64
"""Bytes: a cache line."""


class Unavailable(Exception):
    """The ranks of some host cannot share memory; the text says why. Raised on all ranks alike."""


@dataclass(frozen=True)
class _RankFacts:
    """What a rank says of itself, to find those of its host."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    process: int
    system: str
    """Equal for processes that see each other's process ids."""
    obstacle: str


def find_peers(world: World) -> list[Peer]:
    """Return the ranks with my `node_rank`, by local rank. To be called by all ranks of the job.

    Raises `Unavailable`, on all ranks, when those of some host cannot share memory.
    """
    everyone = [
        _RankFacts(**facts) for facts in all_gather_json(world, "shared memory/places", asdict(_facts_of(world)))
    ]
    refuse(_obstacles(everyone))
    here = [place for place in everyone if place.node_rank == world.node_rank]
    here.sort(key=lambda place: place.local_rank)
    return [Peer(place.rank, place.host, place.process) for place in here]


def _facts_of(world: World) -> _RankFacts:
    obstacle = ""
    system = ""
    if not sys.platform.startswith("linux"):
        obstacle = f"{world.host} runs {platform.system()}, not Linux"
    elif platform.machine() != "x86_64":
        obstacle = f"{world.host} is {platform.machine()}, not x86-64"  # see host_barrier: order of memory
    else:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            system = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
        except OSError as reason:
            obstacle = f"{world.host} has no usable /proc: {reason}"
    return _RankFacts(world.rank, world.node_rank, world.local_rank, world.host, os.getpid(), system, obstacle)


def _obstacles(everyone: Sequence[_RankFacts]) -> list[str]:
    """Return the reasons why shared memory is unavailable on a host: the same list on all ranks."""
    found = [place.obstacle for place in everyone if place.obstacle]
    for node_rank in sorted({place.node_rank for place in everyone}):
        here = [place for place in everyone if place.node_rank == node_rank]
        if len(here) == 1:
            found.append(f"rank {here[0].rank} is alone on {here[0].host}")
        elif len({place.system for place in here}) > 1:
            found.append(f"the ranks of node {node_rank} do not run in one system, or not in one container")
        elif sorted(place.local_rank for place in here) != list(range(len(here))):
            found.append(f"the {len(here)} ranks of node {node_rank} are not numbered 0-{len(here) - 1} there")
    return found


def refuse(obstacles: Sequence[str]) -> None:
    """Raise `Unavailable` with the obstacles that are not empty, if any. Give it the same on all ranks."""
    found = [obstacle for obstacle in obstacles if obstacle]
    if found:
        raise Unavailable("; ".join(found[:3]))


def share(
    world: World, topic: str, peers: Sequence[Peer], byte_count: int, facts: dict[str, Any]
) -> list[torch.Tensor]:
    """Make memory of `byte_count` zeros and map every peer's: uint8 tensors, by local rank.

    To be called by all ranks of the job. Raises `Mismatch` when `facts` differ, `Unavailable` when some rank
    cannot make or map memory, and `PeerLost` when one has ended, on all ranks. See [Note: memory without a name].
    """
    byte_count = max(ALIGNMENT, byte_count)
    memory, problem = _make(byte_count)
    try:
        seen = all_gather_json(world, topic, {"memory": memory, "file": file_identity(memory), **facts})
        for label in facts:
            require_equal(world, topic, label, [said[label] for said in seen])
        mapped: list[torch.Tensor] = []
        gone: list[int] = []
        try:
            for peer in peers:
                path = f"/proc/{peer.process}/fd/{seen[peer.rank]['memory']}"
                mapped.append(_map(path, seen[peer.rank]["file"], byte_count))
        except (OSError, RuntimeError) as reason:
            problem = problem or f"rank {world.job_rank} on {world.host} cannot share memory: {reason}"
            gone = [peer.rank for peer in peers if _has_ended(peer.process)]
        said = all_gather_json(world, f"{topic}/mapped", [problem, gone])
        if ended := sorted({rank for _, ranks in said for rank in ranks}):
            raise PeerLost(f"{name_ranks(ended)} ended meanwhile", rank=world.job_rank, operation=topic)
        refuse([text for text, _ in said])
        mine = [peer.rank for peer in peers].index(world.rank)
        separate_in_child(mapped[mine], memory)
        memory = -1
        return mapped
    finally:
        if memory >= 0:
            os.close(memory)


def _has_ended(process: int) -> bool:
    """Return whether a process is gone, or waits for its parent to take notice."""
    try:
        with os.scandir(f"/proc/{process}/fd") as descriptors:
            return next(descriptors, None) is None
    except OSError as problem:
        return not isinstance(problem, PermissionError)


def _make(byte_count: int) -> tuple[int, str]:
    """Return a descriptor of memory, or -1 and why not."""
    memory = -1
    try:
        memory = os.memfd_create("farandole", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(memory, 0, byte_count)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as reason:
        if memory >= 0:
            os.close(memory)
        return -1, f"no {byte_count} bytes of shared memory: {reason}"
    return memory, ""


def _map(path: str, file: list[int], byte_count: int) -> torch.Tensor:
    """Map what `path` names: uint8, (byte_count,), all pages present. Raises OSError when it is not `file`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if file_identity(descriptor) != file:
            raise OSError(f"{path} is not what its rank made")
        mapped = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=byte_count, dtype=torch.uint8)
    finally:
        os.close(descriptor)
    mapped[::PAGE_BYTES].sum()
    return mapped


def file_identity(descriptor: int) -> list[int]:
    """Return what tells an open file from all others of this host; empty for a negative number."""
    if descriptor < 0:
        return []
    status = os.fstat(descriptor)
    return [status.st_dev, status.st_ino]


def aligned(byte_count: int) -> int:
    """Return `byte_count` rounded up to whole cache lines."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT

"""All-reduce among the ranks of one host, for tensors that live in memory which these ranks share.

Nothing is copied in or out: `SharedTensor.mine` is where a rank computes, and where it finds the sum.

[Note: memory without a name] Each rank makes its memory with memfd_create(2). The others open it as
/proc/<process>/fd/<number>, and every descriptor is closed as soon as all have mapped it. The memory has no
name in any file system, needs no /dev/shm, and ends with the last process that maps it, kill -9 or not.
Its size is sealed, so that no rank can meet a hole.

[Note: who sums what] A tensor is cut into one slice a rank. Between two barriers each rank adds its slice of
all parts into its own part, in the order r, r+1, ... of local ranks, and writes the sum into the others', in
pieces that stay in the cache between these two. An element's sum is made by one rank and copied, so all have
the same bits; and `reduce_scatter` then `all_gather` give the same bits as `all_reduce`.

[Note: one barrier for small tensors] With a tensor of a few KB the barriers are what costs. There each rank
copies its own into an inbox that all can read, waits at one barrier, and sums all inboxes into its own tensor,
in the order 0, 1, ... The second barrier would keep a fast rank from writing its inbox again while a slow one
still reads it; instead there are two inboxes, used by turns. A rank writes inbox k again two calls later, and
then it has passed the barrier of the call between, at which every rank arrives only after it has read inbox k.
"""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ConfigError
from .agree import gather, refuse_difference
from .host_barrier import PAGE_BYTES, HostBarrier, Peer
from .world import World

ALIGNMENT = 64
"""Bytes: a cache line."""
PIECE_BYTES = 128 * 1024
SMALL_BYTES = 16 * 1024
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


class Unavailable(Exception):
    """The ranks of some host cannot share memory; the text says why. Raised on all ranks alike."""


class SharedMemory:
    """What the ranks of one host share. Made by `connect`, on all ranks of the job.

    Operations on its tensors are to be called by all ranks of the host in the same order, by one thread at a
    time.
    """

    def __init__(self, world: World, peers: Sequence[Peer], timeout_seconds: float) -> None:
        self.local_rank = [peer.rank for peer in peers].index(world.rank)
        self.local_size = len(peers)
        self._world = world
        self._peers = peers
        self._tensor_count = 0
        pages = _share(world, "shared memory", peers, PAGE_BYTES, {})
        problem = ""
        try:
            self._barrier = HostBarrier(peers, self.local_rank, pages, timeout_seconds)
        except OSError as reason:
            problem = f"rank {world.rank} on {world.host} cannot watch its peers: {reason}"
        try:
            _refuse(gather(world, "shared memory/watched", problem))
        except BaseException:
            if not problem:
                self._barrier.close()
            raise
        world.call_on_close(self.close)

    @classmethod
    def connect(cls, world: World, *, timeout_seconds: float) -> SharedMemory:
        """Share memory among the ranks with my `node_rank`. To be called by all ranks of the job, in the same order.

        `timeout_seconds` is how long an operation waits for the other ranks of the host. Raises `Unavailable`
        on all ranks when it cannot be done on some host, `Stalled` when a rank does not come.
        """
        everyone = [_Place(**said) for said in gather(world, "shared memory/places", asdict(_place_of(world)))]
        _refuse(_obstacles(everyone))
        here = [place for place in everyone if place.node_rank == world.node_rank]
        here.sort(key=lambda place: place.local_rank)
        return cls(world, [Peer(place.rank, place.host, place.process) for place in here], timeout_seconds)

    def allocate(self, elements: int, dtype: torch.dtype) -> SharedTensor:
        """Return a tensor of zeros that every rank of the host has a part of.

        To be called by all ranks of the job in the same order with the same arguments: raises `Mismatch`
        otherwise, on all ranks. Raises `Unavailable`, on all ranks, when memory is out.
        """
        if elements < 0 or ALIGNMENT % dtype.itemsize:
            raise ConfigError(f"cannot share {elements} elements of {dtype}")
        self._tensor_count += 1
        topic = f"shared tensor {self._tensor_count}"
        facts = {"elements": elements, "dtype": str(dtype)}
        room = _aligned(elements * dtype.itemsize)
        byte_count = 3 * room if room <= SMALL_BYTES else room
        memory = _share(self._world, topic, self._peers, byte_count, facts)
        return SharedTensor(memory, elements, dtype, self.local_rank, self._tensor_count, self._barrier)

    def close(self) -> None:
        """Leave: others that wait for me raise `PeerLost`. Tensors keep their memory until they are dropped.

        May be called twice. Called when the world closes.
        """
        self._barrier.close()


class SharedTensor:
    """One flat tensor a rank, in memory that all ranks of the host can reach. Made by `SharedMemory.allocate`.

    The operations raise `PeerLost`, `Stalled` or `Mismatch`; contents are undefined then, and further
    operations raise the same.
    """

    def __init__(
        self,
        memory: Sequence[torch.Tensor],
        elements: int,
        dtype: torch.dtype,
        local_rank: int,
        number: int,
        barrier: HostBarrier,
    ) -> None:
        """`memory`: every local rank's, uint8: the tensor and, for a small one, two inboxes."""
        room = _aligned(elements * dtype.itemsize)

        def cut(start: int) -> list[torch.Tensor]:
            return [bytes_[start : start + elements * dtype.itemsize].view(dtype) for bytes_ in memory]

        self.parts = cut(0)
        """Every local rank's tensor, (elements,), by local rank."""
        self.mine = self.parts[local_rank]
        """This rank's own."""
        self._local_rank = local_rank
        self._barrier = barrier
        self._number = number
        self._label = f"shared tensor {number}: {elements} of {dtype}"
        self._inboxes = [cut(room), cut(2 * room)] if room <= SMALL_BYTES else []
        self._turn = 0
        self._pieces = [self._cut_slice(i) for i in range(len(memory))]
        """By slice: its pieces, each of every rank's part, from the slice's owner on."""

    def slice_bounds(self, local_rank: int) -> tuple[int, int]:
        """Return where that rank's slice begins and ends, in elements. Slices begin at multiples of 64 bytes,
        cover the tensor in order, and the last may be shorter or empty.
        """
        elements = self.mine.numel()
        line = ALIGNMENT // self.mine.itemsize
        length = -(-elements // (len(self.parts) * line)) * line
        return min(local_rank * length, elements), min((local_rank + 1) * length, elements)

    def all_reduce(self) -> None:
        """Put the sum of all ranks' `mine` into every rank's `mine`, the same bits on all."""
        if self._inboxes:
            self._all_reduce_small()
            return
        self._wait(0)
        for mine, *others in self._pieces[self._local_rank]:
            for other in others:
                mine.add_(other)
            for other in others:
                other.copy_(mine)
        self._wait(0)

    def reduce_scatter(self) -> torch.Tensor:
        """Return my slice of `mine`, with the sum of all ranks' in it; the rest of `mine` is undefined."""
        self._wait(1)
        for mine, *others in self._pieces[self._local_rank]:
            for other in others:
                mine.add_(other)
        self._wait(1)
        begin, end = self.slice_bounds(self._local_rank)
        return self.mine[begin:end]

    def all_gather(self) -> None:
        """Put every rank's slice of its `mine` into all others'."""
        self._wait(2)
        for mine, *others in self._pieces[self._local_rank]:
            for other in others:
                other.copy_(mine)
        self._wait(2)

    def _all_reduce_small(self) -> None:
        """See [Note: one barrier for small tensors]."""
        inboxes = self._inboxes[self._turn]
        self._turn = 1 - self._turn
        inboxes[self._local_rank].copy_(self.mine)
        self._wait(0)
        torch.add(inboxes[0], inboxes[1], out=self.mine)
        for inbox in inboxes[2:]:
            self.mine.add_(inbox)

    def _cut_slice(self, owner: int) -> list[tuple[torch.Tensor, ...]]:
        begin, end = self.slice_bounds(owner)
        if begin == end or owner != self._local_rank:
            return []
        slices = [part[begin:end] for part in self.parts[owner:] + self.parts[:owner]]
        return list(zip(*(slice_.split(PIECE_BYTES // slice_.itemsize) for slice_ in slices), strict=True))

    def _wait(self, operation: int) -> None:
        self._barrier.wait(self._number * len(_OPERATIONS) + operation, self._name)

    def _name(self, word: int) -> str:
        number, operation = divmod(word, len(_OPERATIONS))
        label = self._label if number == self._number else f"shared tensor {number}"
        return f"{_OPERATIONS[operation]} of {label}"


@dataclass(frozen=True)
class _Place:
    """What a rank says of itself, to find those of its host."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    process: int
    system: str
    """Equal for processes that see each other's process ids."""
    obstacle: str


def _place_of(world: World) -> _Place:
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
    return _Place(
        world.rank, world.node_rank, world.local_rank, world.host, os.getpid(), system, obstacle
    )


def _obstacles(everyone: Sequence[_Place]) -> list[str]:
    """Return what stands against sharing memory on some host: the same list on all ranks."""
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


def _refuse(obstacles: Sequence[str]) -> None:
    found = [obstacle for obstacle in obstacles if obstacle]
    if found:
        raise Unavailable("; ".join(found[:3]))


def _share(
    world: World, topic: str, peers: Sequence[Peer], byte_count: int, facts: dict[str, Any]
) -> list[torch.Tensor]:
    """Make memory of `byte_count` zeros and map every peer's: uint8 tensors, by local rank.

    To be called by all ranks of the job. Raises `Mismatch` when `facts` differ, `Unavailable` when some rank
    cannot make or map memory, both on all ranks. See [Note: memory without a name].
    """
    byte_count = max(ALIGNMENT, byte_count)
    memory, problem = _make(byte_count)
    try:
        seen = gather(world, topic, {"memory": memory, "file": _identity(memory), **facts})
        for label in facts:
            refuse_difference(world, topic, label, [said[label] for said in seen])
        mapped: list[torch.Tensor] = []
        try:
            for peer in peers:
                path = f"/proc/{peer.process}/fd/{seen[peer.rank]['memory']}"
                mapped.append(_map(path, seen[peer.rank]["file"], byte_count))
        except (OSError, RuntimeError) as reason:
            problem = problem or f"rank {world.rank} on {world.host} cannot share memory: {reason}"
        _refuse(gather(world, f"{topic}/mapped", problem))
        return mapped
    finally:
        if memory >= 0:
            os.close(memory)


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
        if _identity(descriptor) != file:
            raise OSError(f"{path} is not what its rank made")
        mapped = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=byte_count, dtype=torch.uint8)
    finally:
        os.close(descriptor)
    mapped[::PAGE_BYTES].sum()
    return mapped


def _identity(descriptor: int) -> list[int]:
    if descriptor < 0:
        return []
    status = os.fstat(descriptor)
    return [status.st_dev, status.st_ino]


def _aligned(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT) * ALIGNMENT

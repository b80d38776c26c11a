"""The ranks of this host, and memory that all of them map.

[Note: memory without a name] Each rank makes its memory with memfd_create(2). The others open it as
/proc/<process>/fd/<number>, and close that when all have mapped it; the maker keeps its own, to map it anew in
a forked child (`forks.separate_in_child`). The memory has no name in any file system, needs no /dev/shm, and ends
with the last process that maps it, kill -9 or not. Its size is sealed, so that no rank can meet a hole.
"""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..world.forks import separate_in_child
from ..world.store_sync import all_gather_json, require_equal
from ..world.world import World
from .barrier import PAGE_BYTES, Peer

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
    cannot make or map memory, both on all ranks. See [Note: memory without a name].
    """
    byte_count = max(ALIGNMENT, byte_count)
    memory, problem = _make(byte_count)
    try:
        seen = all_gather_json(world, topic, {"memory": memory, "file": _identity(memory), **facts})
        for label in facts:
            require_equal(world, topic, label, [said[label] for said in seen])
        mapped: list[torch.Tensor] = []
        try:
            for peer in peers:
                path = f"/proc/{peer.process}/fd/{seen[peer.rank]['memory']}"
                mapped.append(_map(path, seen[peer.rank]["file"], byte_count))
        except (OSError, RuntimeError) as reason:
            problem = problem or f"rank {world.job_rank} on {world.host} cannot share memory: {reason}"
        refuse(all_gather_json(world, f"{topic}/mapped", problem))
        mine = [peer.rank for peer in peers].index(world.rank)
        separate_in_child(mapped[mine], memory)
        memory = -1
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


def aligned(byte_count: int) -> int:
    """Return `byte_count` rounded up to whole cache lines."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT

"""What becomes of a world in a forked child: it is no rank.

[Note: a forked child is no rank] A child has its parent's memory, descriptors and exit handlers, and none of
its threads. It must not speak for its parent: not say that it left, not shut what both hold, not write its files.
Nor may it keep the parent's connections open: a rank that is killed while a worker of its loader works on would
not be detected. So in the child every connection of a world is replaced by /dev/null, and whatever a backend's
destructor would wait for (its threads are not there) is never destroyed. Gradients may lie in memory that ranks
share; the child's are a copy, as all its memory is. The remaining world object gives the parent's rank, and
refuses everything else.

[Note: a spawned worker is no rank] A process of multiprocessing's "spawn" or "forkserver" has its rank's
variables, and imports the rank's script once more: without a guard around its start, the worker says that it is
the rank.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import weakref
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from ...core.host.open_sockets import Key, accepted_by, open_sockets
from ...core.rank_variables import RankVariables
from ...core.vocabulary.errors import ConfigError

_FIXED = 0x10
"""MAP_FIXED of mmap(2): replaces what is mapped there."""
_PLACE = "farandole place"
_shared: dict[int, tuple[int, int]] = {}
"""Memory that this rank shares with others, by its descriptor: address and bytes."""


def separate_in_child(memory: torch.Tensor, descriptor: int) -> None:
    """Let a forked child have a copy of `memory`, which is shared and lies in the file of `descriptor`.

    The descriptor is owned from now on, and is closed when the memory is unmapped.
    """
    storage = memory.untyped_storage()
    _shared[descriptor] = (storage.data_ptr(), storage.nbytes())
    weakref.finalize(storage, _unmapped, descriptor).atexit = False


def _unmapped(descriptor: int) -> None:
    _shared.pop(descriptor, None)
    os.close(descriptor)


def separate_memory() -> None:
    """In a forked child: map what is shared once more, so that what the child writes is its own."""
    if not _shared:
        return
    map_again = memory_calls().mmap
    for descriptor, (address, byte_count) in _shared.items():
        map_again(address, byte_count, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED, descriptor, 0)


def memory_calls() -> ctypes.CDLL:
    """Return the C library with the types of mmap(2), mremap(2) and munmap(2)."""
    libc, address, length = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = libc.mremap.restype = address
    libc.mmap.argtypes = (address, length, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mremap.argtypes = (address, length, length, ctypes.c_int, address)
    libc.munmap.argtypes = (address, length)
    return libc


def replace_sockets(mine: Iterable[Key]) -> None:
    """Close connections and listeners in this process. Their numbers stay in use, as other code holds them.

    What listeners of `mine` accepted is theirs: a store's thread accepts when a rank connects, at any time.
    """
    now = open_sockets()
    found = now.intersection(mine)
    if not found:
        return
    found |= accepted_by(found, now - found)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, _ in found:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def keep_for_ever(things: Iterable[object]) -> None:
    """Never destroy these: a destructor would wait for threads that a forked child does not have."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def inherited_groups() -> list[object]:
    """Return torch's process groups and their stores."""
    if not dist.is_available():
        return []
    known = getattr(dist.distributed_c10d._world, "pg_map", {})
    return [thing for group, (_, store) in known.items() for thing in (group, store)]


def refuse_inherited_group(rank: int, size: int) -> None:
    """Raise `ConfigError` in a forked child that wants a world while it holds its parent's process group."""
    raise ConfigError(
        f"this process was forked from rank {rank} of {size}, and holds what connects that rank to the others",
        remedy='start it with multiprocessing\'s "spawn", or fork before farandole.init()',
    )


def tell_children(place: RankVariables | None) -> None:
    """Let the processes that multiprocessing starts from now on know which rank this is; None: none any more."""
    process: Any = multiprocessing.current_process()
    process._config[_PLACE] = None if place is None else (os.getpid(), *astuple(place))  # handed on to children


def refuse_spawned_worker(place: RankVariables) -> None:
    """Raise `ConfigError` in a worker of a rank that says it is that rank.

    One that was given a place of its own is a rank. See [Note: a spawned worker is no rank].
    """
    process: Any = multiprocessing.current_process()
    what = f"this is a spawned worker of rank {place.rank}"
    if getattr(process, "_inheriting", False):  # while the worker imports the script
        raise ConfigError(
            f"{what}, which imports the script once more",
            remedy="put the start of the script under if __name__ == '__main__'",
        )
    rank, *theirs = process._config.get(_PLACE) or (os.getpid(),)
    if rank != os.getpid() and theirs == list(astuple(place)):
        raise ConfigError(
            f"{what}, and no rank itself",
            remedy="call farandole.init() and exchange with the other ranks in the rank's own process",
        )

"""The first words between ranks: refuse those of another job, version or size before any group is made.

[Note: a store that outlives its processes] The agent of torchrun serves the store, keeps it when it starts all
ranks anew, and does not say which start this is: each agent counts its own failures, and no change of nodes is
counted. A new process would read what a dead one said. So rank 0 names each start by a random text, and the
others, which may have read the name before, take their places under it in the store. Rank 0 goes on when all
have done so. A rank that finds its place taken, or is told that the start is over, goes on to the next one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...core.environ.env import nccl_host
from ...core.launchers.rank_variables import how_to_start_all
from ...core.vocabulary.errors import ConfigError, Mismatch
from ...version import VERSION
from ..device.accelerator import unique_id
from .comm_errors import translated
from .host_address import own_address, wait_for_routes
from .rendezvous import tell_late
from .store_sync import all_gather_json, nobody_answered, require_equal
from .world import World

_MEETING = "meeting the other ranks"


def agree_on_start(world: World, store: dist.Store) -> str:
    """Return a text that is equal on the processes that were started together, and was never used in `store`.

    To be called by all ranks. See [Note: a store that outlives its processes]. Raises `Stalled` naming the ranks
    that do not come.
    """
    store = dist.PrefixStore(f"starts of {world.size}", store)
    mine = secrets.token_hex(8)

    def places(start: str) -> list[str]:
        return [f"{start}/{rank}" for rank in range(world.size)]

    def hear(keys: list[str], awaited: list[str] | None = None) -> str:
        try:
            store.wait(keys, timedelta(seconds=world.timeout_seconds))
            return store.get(keys[0]).decode()
        except RuntimeError as problem:
            raise nobody_answered(
                world, store, _MEETING, awaited or keys, problem, remedy=how_to_start_all()
            ) from None

    with translated(world, _MEETING):
        if world.rank == 0:
            before = store.get("newest").decode() if store.check(["newest"]) else ""
            store.set("newest", mine)
            if before:
                store.compare_set(f"{before}/state", "", "over")
                store.set(f"{before}/next", mine)
            store.set(f"{mine}/0", mine)
            hear(places(mine))
            store.set(f"{mine}/state", "met")
            return mine
        start = hear(["newest"])
        while (
            store.compare_set(f"{start}/{world.rank}", "", mine).decode() != mine
            or hear([f"{start}/state"], places(start)) != "met"
        ):
            start = hear([f"{start}/next"])
        return start


def handshake(world: World, *, owns_gpu: bool, is_kept: bool = False) -> None:
    """Meet: refuse ranks of another world size, another version, or with a rank already taken.

    Args:
        world: the ranks, with a store.
        owns_gpu: whether a group of NCCL is made next, which takes one rank a GPU: two on one are refused.
        is_kept: whether the store may hold what processes said that are gone; the world then gets a part of it.
    """
    assert world.store is not None, "introduce needs a store"
    if is_kept:
        world.groups.store = dist.PrefixStore(agree_on_start(world, world.store), world.store)
    me = {
        "size": world.size, "farandole": VERSION, "torch": torch.__version__, "process": os.getpid(),
        "address": own_address(world.address) if world.node_count > 1 else "",
        "gpu": _taken_gpu(world.device), "place": f"{world.device} of {world.host}", "host": world.host,
    }  # fmt: skip
    name = f"{world.host}:{os.getpid()}"
    with translated(world, _MEETING):
        holder = world.store.compare_set(f"holder/{world.rank}", "", name).decode()
    if holder not in ("", name):
        raise Mismatch(
            f"two processes say they are rank {world.rank}: {holder} and {name}",
            rank=world.job_rank,
            operation=_MEETING,
            remedy="give each process its own rank, or start with: farandole run",
        )
    late = partial(tell_late, 0, world.size, timeout_seconds=world.timeout_seconds)
    seen = all_gather_json(
        world, "introduce", me, tell_late=None if world.rank else late, remedy=how_to_start_all()
    )
    for key, what in (("size", "world size"), ("farandole", "farandole version"), ("torch", "torch version")):
        require_equal(world, _MEETING, what, [other[key] for other in seen])
    if owns_gpu:
        _refuse_shared_gpus(seen)
    world.groups.hosts = tuple(str(other["host"]) for other in seen)
    addresses = {other["address"] for other in seen}
    wait_for_routes(addresses, world.timeout_seconds, is_over=lambda: world.sockets.shut_down)


def _taken_gpu(device: torch.device) -> str:
    """Return what NCCL tells GPUs apart by. Ranks with names of hosts of their own may share one; for tests."""
    found = unique_id(device)
    return f"{found} {nccl_host()}" if found else ""


def _refuse_shared_gpus(seen: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError`, on all ranks, where two have one GPU: NCCL would fail later, in words of its own."""
    owners: dict[str, int] = {}
    for rank, other in enumerate(seen):
        first = owners.setdefault(other["gpu"], rank) if other["gpu"] else rank
        if first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} are both on {other['place']}, and NCCL takes one rank a GPU",
                remedy='start as many ranks a host as it has GPUs, or train on the CPU with fd.init(device="cpu")',
            )

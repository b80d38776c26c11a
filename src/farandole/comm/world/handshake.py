"""The first words between ranks: refuse those of another job, version or size before any group is made."""

from __future__ import annotations

import os

import torch

from ...core.vocabulary.errors import Mismatch
from ...version import VERSION
from .comm_errors import translated
from .host_address import own_address, wait_for_routes
from .store_sync import all_gather_json, require_equal
from .world import World


def handshake(world: World) -> None:
    """Meet: refuse ranks of another world size, another version, or with a rank already taken."""
    assert world.store is not None, "introduce needs a store"
    me = {
        "size": world.size, "farandole": VERSION, "torch": torch.__version__, "process": os.getpid(),
        "address": own_address(world.address) if world.node_count > 1 else "",
    }  # fmt: skip
    name = f"{world.host}:{os.getpid()}"
    with translated(world, "meeting the other ranks"):
        holder = world.store.compare_set(f"holder/{world.rank}", "", name).decode()
    if holder not in ("", name):
        raise Mismatch(
            f"two processes say they are rank {world.rank}: {holder} and {name}",
            rank=world.job_rank,
            operation="meeting the other ranks",
            remedy="give each process its own rank, or start with: farandole run",
        )
    seen = all_gather_json(world, "introduce", me)
    for key, what in (("size", "world size"), ("farandole", "farandole version"), ("torch", "torch version")):
        require_equal(world, "meeting the other ranks", what, [other[key] for other in seen])
    addresses = {other["address"] for other in seen}
    wait_for_routes(addresses, world.timeout_seconds, is_over=lambda: world.sockets.shut_down)

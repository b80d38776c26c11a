"""The first words between ranks: refuse those of another job, version or size before any group is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.environ.nccl import nccl_host
from ...core.vocabulary.errors import ConfigError, Mismatch
from ...version import VERSION
from ..device.accelerator import unique_id
from .comm_errors import translated
from .host_address import own_address, wait_for_routes
from .store_sync import all_gather_json, require_equal
from .world import World


def handshake(world: World, *, owns_gpu: bool) -> None:
    """Meet: refuse ranks of another world size, another version, or with a rank already taken.

    `owns_gpu`: whether a group of NCCL is made next, which takes one rank a GPU: two on one are refused.
    """
    assert world.store is not None, "introduce needs a store"
    me = {
        "size": world.size, "farandole": VERSION, "torch": torch.__version__, "process": os.getpid(),
        "address": own_address(world.address) if world.node_count > 1 else "",
        "gpu": _taken_gpu(world.device), "place": f"{world.device} of {world.host}",
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
    if owns_gpu:
        _refuse_shared_gpus(seen)
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

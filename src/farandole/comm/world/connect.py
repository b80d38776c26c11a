"""How a process becomes a rank: from the rank variables to a world whose ranks are connected."""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...core.env import BACKENDS, nccl_host, read_backend, read_elastic_settings
from ...core.failures import first_line
from ...core.host.stacks import OutermostHook
from ...core.rank_variables import RankVariables, how_to_start_all, read_rank_variables
from ...core.vocabulary.degrees import Degrees
from ...core.vocabulary.errors import CommError, ConfigError, Mismatch
from ...version import VERSION
from ..device.accelerator import backend_of, local_gpu, set_device, unique_id
from . import forks
from .comm_errors import noticed_sockets, translate_error, translated
from .rendezvous import (
    forget_generation,
    forget_meetings,
    forget_world_before,
    fresh_prefix,
    open_store,
    own_address,
    tell_late,
    wait_for_routes,
)
from .store_sync import all_gather_json, nobody_answered, require_equal
from .world import APART, DEFAULT_TIMEOUT_SECONDS, ProcessGroups, World, build_time, current, set_patience


@functools.cache
def watch_forks() -> None:
    """See [Note: a forked child is no rank]; what is of a higher layer is to be registered after this."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """See [Note: a forked child is no rank]."""
    here, current.world, current.sockets = current.world, None, None
    forks.separate_memory()
    forks.keep_for_ever(forks.inherited_groups())
    forget_meetings()
    forks.replace_sockets(noticed_sockets())
    current.has_parents_group = dist.is_available() and dist.is_initialized()
    if here is not None:
        current.parents = here
        here.enter_forked_child()


def connect(
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    device: str | torch.device | None = None,
    backend: str | None = None,
) -> World:
    """Make this process's world from the rank variables; a world of one when there are none.

    `backend` is that of torch's groups for CPU tensors, of `env.BACKENDS`; None: what the launcher says, or gloo.
    Raises `ConfigError` for variables that make no sense, `Mismatch` when ranks disagree on the
    world's size, `Stalled` (naming who is missing) when ranks do not arrive within `timeout_seconds`.
    """
    if current.world is not None:
        return current.world
    if not 0 < timeout_seconds < float("inf"):
        raise ConfigError(f"timeout_seconds={timeout_seconds}: expected a positive number of seconds")
    backend = _choose_backend(backend)
    watch_forks()
    if current.has_parents_group and current.parents is not None and dist.is_initialized():
        forks.refuse_inherited_group(current.parents.rank, current.parents.size)
    place = read_rank_variables()
    if place is None and dist.is_available() and dist.is_initialized():
        place = _place_of_existing_group()
    if place is None or place.size == 1:
        made = World(0, 1, 0, 1, 0, 1, socket.gethostname(), None, _device(device, 0), "alone", timeout_seconds)
    else:
        made = _connect_many(place, timeout_seconds, _device(device, place.local_rank), backend)
    current.world, current.parents = made, None
    return made


def be_apart(
    rank: int, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, device: str | torch.device | None = None
) -> World:
    """Make a world of this rank alone, which `connect_again` lets be one of several."""
    watch_forks()
    made = World(rank, 1, 0, 1, 0, 1, socket.gethostname(), None, _device(device, 0), APART, timeout_seconds)
    current.world, current.parents = made, None
    return made


def part_again(here: World, rank: int) -> None:
    """Let a rank that `connect_again` has connected be alone once more, as `be_apart` made it."""
    here.groups.close()
    forget_generation()
    here.rank, here.size, here.source, here.groups = rank, 1, APART, ProcessGroups()
    current.sockets = here.sockets


_PLACE = ("rank", "size", "local_rank", "local_size", "node_rank", "node_count", "address", "source", "groups")


def connect_again(here: World, enter: Callable[[Callable[[], World]], World]) -> None:
    """Let `here`, whose groups are of no more use, be the ranks of a job's next generation.

    What holds it sees them from now on; its session stays. `enter` calls what it is given when the ranks are
    there. Raises what `enter` raises, and `here` is closed then.
    """
    timeout_seconds, device, session = here.timeout_seconds, here.device, here.session
    here.groups.close()
    forget_generation()
    current.world = current.sockets = None
    try:
        made = enter(lambda: connect(timeout_seconds=timeout_seconds, device=device))
    except BaseException:
        here.closed = True
        raise
    for name in _PLACE:
        setattr(here, name, getattr(made, name))
    if session.degrees is not None:
        session.degrees = Degrees(data=here.size)
    here.closed = False  # also after an attempt that failed
    current.world, current.sockets = here, here.sockets


@contextmanager
def as_if_alone(here: World) -> Iterator[None]:
    """In this context `here` has no other ranks: what is called asks nobody."""
    place = here.size, here.groups
    here.size, here.groups = 1, ProcessGroups()
    try:
        yield
    finally:
        here.size, here.groups = place


def _choose_backend(wanted: str | None) -> str | None:
    """Return the backend that the script or the launcher asks for; None: neither does."""
    if wanted not in (None, *BACKENDS):
        raise ConfigError(f"backend={wanted!r}: expected {' or '.join(BACKENDS)}")
    launchers = read_backend()
    if None not in (wanted, launchers) and wanted != launchers:
        raise ConfigError(
            f"two backends: {wanted} in the script, {launchers} from the launcher (--backend)",
            remedy="drop one of them",
        )
    chosen = wanted or launchers
    if chosen == "farandole" and read_elastic_settings() is not None:
        raise ConfigError(
            "backend farandole in an elastic job: ranks that wait in shared memory cannot be freed",
            remedy='leave it out, or give "gloo"',
        )
    return chosen


def _connect_many(
    place: RankVariables, timeout_seconds: float, device: torch.device, backend: str | None
) -> World:
    forks.refuse_spawned_worker(place)
    made = World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        node_rank=place.node_rank,
        node_count=place.node_count,
        host=socket.gethostname(),
        address=place.address,
        device=device,
        source=place.source,
        timeout_seconds=timeout_seconds,
    )
    current.sockets = made.sockets
    try:
        with made.sockets.noticed():
            _connect_groups(made, place, timedelta(seconds=timeout_seconds), backend)
    except BaseException:
        made.close()
        current.sockets = None
        forget_generation()
        raise
    forks.tell_children(place)
    return made


def _connect_groups(made: World, place: RankVariables, wait: timedelta, wanted: str | None) -> None:
    if dist.is_initialized():
        _refuse_other_backend(wanted)
        made.groups.store = fresh_prefix(("", 0), dist.distributed_c10d._get_default_store())
        made.groups.default = dist.group.WORLD
        handshake(made, owns_gpu=False, is_kept=place.store_is_served)
        return
    made.groups.store = open_store(place, wait, made.sockets)
    handshake(made, owns_gpu=True, is_kept=place.store_is_served)
    with translated(made, "meeting the other ranks"):
        forget_world_before(place)
    for_cpu = wanted or "gloo"
    if for_cpu == "farandole":
        importlib.import_module("farandole.backend")  # registers the name
    for_device = backend_of(made.device)
    backend = f"cpu:{for_cpu},{made.device.type}:{for_device}" if for_device else for_cpu
    options: dict[str, Any] = {"device_id": made.device} if for_device else {}
    made.groups.owns_default = True
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("torch", made.groups.store),
            rank=made.rank,
            world_size=made.size,
            timeout=build_time(wait),
            **options,
        )
    except BaseException as problem:
        # torch names groups by counting them, those too that were not made; ranks that count otherwise never meet.
        dist.distributed_c10d._world.group_count = 0
        if not isinstance(problem, RuntimeError):
            raise
        if made.sockets.shut_down:
            raise translate_error(problem, made, "connecting") from None
        raise CommError(
            f"the ranks found each other but could not connect: {first_line(problem)}",
            rank=made.rank,
            operation="connecting",
            remedy="on several hosts, name the interface with GLOO_SOCKET_IFNAME",
        ) from None
    sys.excepthook = OutermostHook(sys.excepthook)
    made.groups.exception_hooks = hook, sys.excepthook
    group = dist.group.WORLD
    assert group is not None, "the group was just made"
    made.groups.default = set_patience(group, wait)


def _refuse_other_backend(wanted: str | None) -> None:
    """Raise `ConfigError` where torch's group was made by the script, with another backend than `wanted`."""
    found = dist.get_backend_config()
    if wanted is not None and f"cpu:{wanted}" not in found.split(","):
        raise ConfigError(
            f"backend {wanted!r} is asked for, and the script has made a group of {found}",
            remedy=f'init_process_group("{wanted}"), or leave the backend out',
        )


def _place_of_existing_group() -> RankVariables:
    rank, size = dist.get_rank(), dist.get_world_size()
    return RankVariables("torch.distributed", rank, size, rank, size, 0, 1, None, None)


def _device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    if wanted is not None:
        device = torch.device(wanted)
        if backend_of(device) and str(device) == device.type:
            device = torch.device(device.type, local_rank)
    else:
        device = local_gpu(local_rank) or torch.device("cpu")
    if backend_of(device):
        set_device(device)
    return device


# The first words between ranks: refuse those of another job, version or size before any group is made.
#
# [Note: a store that outlives its processes] The agent of torchrun serves the store, keeps it when it starts all
# ranks anew, and does not say which start this is: each agent counts its own failures, and no change of nodes is
# counted. A new process would read what a dead one said. So rank 0 names each start by a random text, and the
# others, which may have read the name before, take their places under it in the store. Rank 0 goes on when all
# have done so. A rank that finds its place taken, or is told that the start is over, goes on to the next one.


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

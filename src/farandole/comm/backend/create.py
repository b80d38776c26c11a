"""Making a group: which of its ranks share a host, and what connects them.

Ranks share a host when they see the same kernel, the same process ids and the same network. If all ranks of a
group do, they exchange by shared memory; otherwise by messages.
"""

from __future__ import annotations

import atexit
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...core.environ.env import read_meeting_address
from ..host_memory.memory import Unavailable, find_peers
from ..transport.comm_thread import CommThread
from ..transport.transport import Transport
from ..world.comm_errors import translated
from ..world.connect import watch_forks
from ..world.world import World
from .exchange import GroupExchange
from .host_exchange import HostExchange
from .mailbox import Mailbox
from .meeting import meet
from .message_exchange import MessageExchange
from .other_devices import DeviceGroup
from .process_group import ProcessGroup

_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""Those of this process, which it leaves when it ends."""


def make_group(options: Any, backend_options: object = None) -> ProcessGroup:
    """Return a group; called by torch, on all ranks of it.

    Args:
        options: torch's `_DistributedBackendOptions`: store, rank, size, time-out, global ranks.
        backend_options: what the user gave as `pg_options`; there are none.

    Raises:
        NotImplementedError: for `backend_options`.
        Stalled: when not all ranks come within the group's time-out.
    """
    if backend_options is not None:
        raise NotImplementedError(f"farandole: pg_options={backend_options!r}: this backend has no options")
    size = int(options.group_size)
    names = tuple(options.global_ranks_in_group) or tuple(range(size))
    return _make(options.store, names, int(options.group_rank), options.timeout.total_seconds())


def _make(store: dist.Store, names: tuple[int, ...], rank: int, timeout_seconds: float) -> ProcessGroup:
    watch_forks()
    world = _world(store, names, rank, timeout_seconds)
    group = _connect(world, names, store)
    _groups.add(group)
    return group


def _split(
    store: dist.Store, group: ProcessGroup, members: Sequence[int], number: int, timeout_seconds: float
) -> ProcessGroup:
    """Return the group of `members`, ranks of `group`, of which this is one; `number` is new, and equal on all."""
    names = tuple(group.global_ranks[member] for member in members)
    part = dist.PrefixStore(f"split {number}/{','.join(map(str, members))}", store)
    return _make(part, names, list(members).index(group.rank()), timeout_seconds)


def _world(store: dist.Store, names: tuple[int, ...], rank: int, timeout_seconds: float) -> World:
    """Return the ranks of the group as a world of their own, which nothing else knows."""
    size = len(names)
    world = World(
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        node_rank=0,
        node_count=1,
        host=socket.gethostname(),
        address=read_meeting_address(),
        device=torch.device("cpu"),
        source="torch.distributed",
        timeout_seconds=timeout_seconds,
    )
    if size > 1:
        # A process may make groups at one store again after it has destroyed them: all ranks count alike.
        with translated(world, "making a group"):
            number = store.add(f"farandole/made by {rank}", 1)
        world.groups.store = dist.PrefixStore(f"farandole/{number}", store)
    hosts = meet(world, names, _host_identity(rank))
    known = list(dict.fromkeys(hosts))
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    world.node_rank, world.node_count = known.index(hosts[rank]), len(known)
    world.local_rank, world.local_size = here.index(rank), len(here)
    return world


def _host_identity(rank: int) -> str:
    """Return a text that is equal for ranks of one host, or of one container where those are kept apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    except OSError:
        return f"rank {rank}"
    return " ".join([boot, *spaces])


def _connect(world: World, names: tuple[int, ...], store: dist.Store) -> ProcessGroup:
    def group(
        exchange: GroupExchange, conductor: CommThread, mailbox: Mailbox | None, *closers: Callable[[], None]
    ) -> ProcessGroup:
        def close() -> None:
            for closer in [*closers, *([] if mailbox is None else [mailbox.close])]:
                closer()

        return DeviceGroup(
            exchange, names, conductor=conductor, mailbox=mailbox, close=close,
            timeout_seconds=world.timeout_seconds, split=partial(_split, store), store=store,
        )  # fmt: skip

    if world.size == 1:
        conductor = CommThread(None)
        return group(_Alone(), conductor, None, conductor.close)
    mailbox = Mailbox(_transport(world, names), names, world.timeout_seconds)
    try:
        shared = _shared(world, names)
        if shared is not None:
            conductor = CommThread(None, shared.close)
            return group(shared, conductor, mailbox, shared.close, conductor.close)
        transport = _transport(world, names)
        conductor = CommThread(transport)
        return group(MessageExchange(transport, names), conductor, mailbox, conductor.close)
    except BaseException:
        mailbox.close()
        raise


def _shared(world: World, names: tuple[int, ...]) -> HostExchange | None:
    """Return the exchange by shared memory; None, on all ranks, where there is none for all of them."""
    if world.node_count > 1:
        return None
    try:
        return HostExchange(world, find_peers(world), names, world.timeout_seconds)
    except Unavailable:
        return None


def _transport(world: World, names: tuple[int, ...]) -> Transport:
    return Transport(world, timeout_seconds=world.timeout_seconds, names=names)


class _Alone:
    """The exchange of one rank: nothing changes hands."""

    rank, size = 0, 1

    def agree(self, call: str, row: Any, seconds: float) -> list[tuple[int, ...]]:
        """See `GroupExchange`."""
        return [tuple(row)]

    def publish(self, mine: Any, incoming: Any, *, readers: Any) -> None:
        """See `GroupExchange`."""

    def swap(self, outgoing: Any, incoming: Any, longest: int) -> None:
        """See `GroupExchange`."""

    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """See `GroupExchange`."""

    def reduce_scatter(self, out: torch.Tensor, pieces: Any, operation: str) -> None:
        """See `GroupExchange`."""
        out.copy_(pieces[0])


@atexit.register
def _leave_all() -> None:
    """Leave all groups when the process ends, so that its threads meet nothing that is gone."""
    for group in list(_groups):
        group.shutdown()

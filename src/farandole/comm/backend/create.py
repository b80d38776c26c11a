"""Making a group: which of its ranks share a host, and what connects them.

Ranks share a host when they see the same kernel, the same process ids and the same network. If all ranks of a
group do, they exchange by shared memory; otherwise by messages.
"""

from __future__ import annotations

import atexit
import json
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...core.environ.env import read_meeting_address
from ...core.launchers.rank_variables import read_rank_variables
from ...core.vocabulary.errors import Mismatch, Stalled
from ...core.vocabulary.rank_lists import name_ranks
from ..host_memory.memory import Unavailable, find_peers
from ..named_ops.data.reductions import HostGroups, host_groups
from ..transport.group_messages import FrameTransport
from ..world.comm_errors import translate_error, translated
from ..world.connect import watch_forks
from ..world.forks import refuse_spawned_worker
from ..world.handshake import agree_on_start
from ..world.world import World
from .calls import CallQueue
from .exchanges.by_host_exchange import ByHostExchange
from .exchanges.exchange import GroupExchange
from .exchanges.host_exchange import HostExchange
from .exchanges.message_exchange import MessageExchange
from .late_connections import LateConnections
from .mailbox import Mailbox
from .other_devices import DeviceGroup
from .process_group import ProcessGroup

# How the ranks of a group meet: all of them come, and all mean the same group.
#
# torch names a group by counting the calls of `new_group`. Ranks that make their groups in different orders meet
# at the same name for different groups: that is a `Mismatch`, and no group in which some are missing.

_MAKING = "making a group"


def meet(world: World, names: Sequence[int], mine: str) -> list[str]:
    """Return the text `mine` of every rank of the group, by rank in the group.

    Args:
        world: the ranks of the group alone, with a store that is new.
        names: their global ranks, for errors.
        mine: what this rank has to say.

    Raises:
        Mismatch: another rank means a group of other ranks.
        Stalled: some ranks do not come; it names them.
    """
    if world.store is None:
        return [mine]
    members = list(names)
    keys = [f"here/{rank}" for rank in range(world.size)]
    text = json.dumps([members, mine])
    with translated(world, _MAKING):
        world.store.set(keys[world.rank], text)
        # Ranks that mean a larger group would wait for those that will not come: who is first decides ...
        first = json.loads(world.store.compare_set("members", "", json.dumps(members)))
        if first != members:
            # ... and a rank that means another group says so under the name of each rank that is still missing.
            for rank in range(len(first)):
                world.store.compare_set(f"here/{rank}", "", text)
    _require_same(members, first, names[world.rank])
    try:
        world.store.wait(keys, timedelta(seconds=world.timeout_seconds))
        said = [json.loads(value) for value in world.store.multi_get(keys)]
    except RuntimeError as problem:
        _raise_missing(world, names, keys, problem)
    for theirs, _ in said:
        _require_same(members, theirs, names[world.rank])
    return [text for _, text in said]


def _require_same(mine: list[int], theirs: list[int], rank: int) -> None:
    if mine != theirs:
        raise Mismatch(
            f"this rank makes a group of ranks {mine}, another one a group of {theirs} in its place",
            rank=rank,
            operation=_MAKING,
            remedy="all ranks must make the same groups in the same order, also those that they are not in",
        )


def _raise_missing(world: World, names: Sequence[int], keys: Sequence[str], problem: RuntimeError) -> NoReturn:
    missing: list[int] = []
    if world.store is not None:
        with suppress(RuntimeError):  # the store is gone: that is the failure
            missing = [name for name, key in zip(names, keys, strict=True) if not world.store.check([key])]
    if not missing:
        raise translate_error(problem, world, _MAKING) from None
    raise Stalled(
        f"{name_ranks(missing)} did not come within {world.timeout_seconds:g} s",
        rank=names[world.rank],
        operation=_MAKING,
        remedy="every rank of a group must make it; the log of a rank that is missing may say why",
    ) from None


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""Those of this process, which it leaves when it ends."""
_starts: list[str] = []
"""What `agree_on_start` returned in the first group of all ranks; empty where no agent serves the store."""


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
    world, hosts = _world(store, names, rank, timeout_seconds)
    group = _connect(world, names, hosts, store)
    _groups.add(group)
    return group


def _split(
    store: dist.Store, group: ProcessGroup, members: Sequence[int], number: int, timeout_seconds: float
) -> ProcessGroup:
    """Return the group of `members`, ranks of `group`, of which this is one; `number` is new, and equal on all."""
    names = tuple(group.global_ranks[member] for member in members)
    part = dist.PrefixStore(f"split {number}/{','.join(map(str, members))}", store)
    return _make(part, names, list(members).index(group.rank()), timeout_seconds)


def _world(
    store: dist.Store, names: tuple[int, ...], rank: int, timeout_seconds: float
) -> tuple[World, list[int]]:
    """Return the ranks of the group as a world of their own, which nothing else knows, and each rank's host."""
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
        place = read_rank_variables()
        if place is not None and place.size == size:
            refuse_spawned_worker(place)
        if not _starts and place is not None and place.store_is_served and place.size == size:
            _starts.append(agree_on_start(world, store))
        store = dist.PrefixStore("/".join(["farandole", *_starts]), store)
        with translated(world, "making a group"):
            number = store.add(f"made by {rank}", 1)
        world.groups.store = dist.PrefixStore(str(number), store)
    hosts = meet(world, names, _host_identity(rank))
    known = list(dict.fromkeys(hosts))
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    world.node_rank, world.node_count = known.index(hosts[rank]), len(known)
    world.local_rank, world.local_size = here.index(rank), len(here)
    return world, [known.index(host) for host in hosts]


def _host_identity(rank: int) -> str:
    """Return a text that is equal for ranks of one host, or of one container where those are kept apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    except OSError:
        return f"rank {rank}"
    return " ".join([boot, *spaces])


def _connect(world: World, names: tuple[int, ...], hosts: Sequence[int], store: dist.Store) -> ProcessGroup:
    def group(exchange: GroupExchange, calls: CallQueue, *closers: Callable[[], None]) -> ProcessGroup:
        def close() -> None:
            for closer in [*closers, calls.close, *([] if mailbox is None else [mailbox.close])]:
                closer()

        return DeviceGroup(
            exchange, names, calls=calls, mailbox=mailbox, close=close, timeout_seconds=world.timeout_seconds,
            split=partial(_split, store), store=world.store or store,
        )  # fmt: skip

    mailbox = None
    if world.size == 1:
        return group(_Alone(), CallQueue(None))
    mailbox = Mailbox(LateConnections(world, names), names)
    try:
        shared = _shared(world, names)
        if shared is not None:
            return group(shared, CallQueue(None, shared.close), shared.close)
        transport = FrameTransport(world, timeout_seconds=world.timeout_seconds, names=names)
        inside, groups = _inside(world, names, hosts)
        if inside is None or groups is None:
            return group(MessageExchange(transport, names), CallQueue(transport))
        exchange = ByHostExchange(transport, names, inside, groups, hosts)
        return group(exchange, CallQueue(transport, inside.close), inside.close)
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


def _inside(
    world: World, names: tuple[int, ...], hosts: Sequence[int]
) -> tuple[HostExchange | None, HostGroups | None]:
    """Return the exchange among this host's ranks; None, on all ranks, where hosts do not have some each."""
    groups = host_groups(range(world.size), world.rank, hosts)
    if groups is None:
        return None, None
    try:
        peers = find_peers(world)
        return HostExchange(world, peers, [names[peer.rank] for peer in peers], world.timeout_seconds), groups
    except Unavailable:
        return None, None


class _Alone:
    """The exchange of one rank: nothing changes hands."""

    rank, size = 0, 1

    def agree(self, call: str, row: Any, seconds: float) -> list[tuple[int, ...]]:
        """See `GroupExchange`."""
        return [tuple(row)]

    def conclude(self) -> None:
        """See `GroupExchange`."""

    def broadcast(self, flat: Any, root: int) -> None:
        """See `GroupExchange`."""

    def all_gather(self, flat: Any, outs: Any) -> None:
        """See `GroupExchange`."""

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

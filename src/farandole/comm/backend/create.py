"""Making a group: which of its ranks share a host, and what connects them.

Ranks share a host when they see the same kernel, the same process ids and the same network. If all ranks of a
group do, they exchange by shared memory; otherwise by messages.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...core.env import read_meeting_address
from ...core.host.process_status import machine_name
from ...core.rank_variables import read_rank_variables
from ...core.vocabulary.errors import Mismatch, Stalled
from ...core.vocabulary.text import name_ranks
from ..device.streams import untraced
from ..transport.group_messages import FrameTransport
from ..transport.host_memory import Unavailable, find_peers
from ..transport.rank_group import HostGroups, host_groups
from ..world.comm_errors import translate_error, translated
from ..world.connect import agree_on_start, watch_forks
from ..world.forks import refuse_spawned_worker
from ..world.world import World
from .calls import CallQueue, GroupWork
from .collectives import GroupExchange
from .host_exchange import ByHostExchange, HostExchange
from .mailbox import LateConnections, Mailbox
from .message_exchange import MessageExchange
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
    return machine_name("pid", "net") or f"rank {rank}"


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


# Groups of several devices, such as "cpu:farandole,cuda:nccl": tensors of other devices go to a group of torch.
#
# [Note: one group, several devices] A process group in Python is the only one that torch makes: there is no
# backend for the other devices then. So ours makes them: one group of torch for each device of
# `get_backend_config`, with that device's backend. It is made at its first tensor, on all ranks alike, because
# torch says what was asked for only after the group is made. Which tensor goes where is decided for each call by
# the first tensor of it.


_OPERATIONS = (
    "broadcast", "reduce", "gather", "scatter", "allreduce", "allreduce_coalesced", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "allgather", "allgather_coalesced",
    "all_gather_single", "all_gather_single_coalesced", "alltoall", "all_to_all_single", "send", "recv",
    "recv_anysource", "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall_base",
)  # fmt: skip
"""Operations of tensors: the rest of a group's methods have none."""


class DeviceGroup(ProcessGroup):
    """A `ProcessGroup` that gives tensors of other devices to their backends."""

    def __init__(self, *arguments: Any, store: dist.Store, **named: Any) -> None:
        """`store`: of the group alone. The rest is that of `GroupBase`."""
        super().__init__(*arguments, **named)
        self._store = store
        self._inner: dict[str, Any] = {}

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backend_names() or ["cpu"]]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind == "cpu" or not self._backend_names():
            return self  # torch asks before the group is registered, and whether connections can be made early
        return self._group_of(kind)._get_backend(torch.device(kind))

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type == "cpu":
            raise NotImplementedError(
                "farandole: calls with CPU tensors are not coalesced by device: leave `device` out of the "
                "coalescing manager, or make them one after the other"
            )
        self._group_of(torch.device(device).type)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._group_of(torch.device(device).type)._end_coalescing(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each wait last `timeout` at most, on all devices."""
        super().set_timeout(timeout)
        for group in self._inner.values():
            group.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group on all devices."""
        super().shutdown()
        for group in self._inner.values():
            group.shutdown()

    def abort(self) -> None:
        """Leave the group on all devices at once."""
        super().abort()
        for group in self._inner.values():
            group.abort()

    def _backend_names(self) -> dict[str, str]:
        """Return the backend of each device, as the group was asked for; nothing before torch knows the group."""
        config = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        return dict(pair.split(":") for pair in config.split(",") if pair)

    def _has_no_data(self, tensor: torch.Tensor) -> bool:
        """Return whether it is a fake tensor, or a meta one that no backend is for: shapes are all there is."""
        if tensor.is_meta:
            return "meta" not in self._backend_names()
        fakes = sys.modules.get("torch._subclasses.fake_tensor")
        return fakes is not None and isinstance(tensor, fakes.FakeTensor)

    def _group_of(self, kind: str) -> Any:
        """Return torch's group for a kind of device; see [Note: one group, several devices]."""
        if kind not in self._inner:
            name = self._backend_names().get(kind)
            if name is None:
                raise NotImplementedError(
                    f"farandole: a tensor on {kind}: this backend has CPU tensors only, and the group no other "
                    f'(make it with "cpu:farandole,{kind}:..." and a backend of torch)'
                )
            self._inner[kind] = self._make(kind, name)
        return self._inner[kind]

    def _make(self, kind: str, name: str) -> Any:
        store = dist.PrefixStore(f"{kind}/", self._store)
        rank, size, wait = self.rank(), self.size(), timedelta(seconds=self._timeout_seconds)
        group: Any = dist.ProcessGroup(store, rank, size)
        if name == "gloo":
            number = dist.ProcessGroup.BackendType.GLOO
            backend: Any = dist.ProcessGroupGloo(store, rank, size, timeout=wait)
        elif name == "nccl":
            number = dist.ProcessGroup.BackendType.NCCL
            backend = self._make_nccl(store, wait)
        elif name.upper() in dist.Backend._plugins:
            number = dist.ProcessGroup.BackendType.CUSTOM
            backend = self._make_plugin(name, store, wait)
        else:
            raise NotImplementedError(
                f"farandole: {kind}:{name} beside cpu:farandole: other devices may have gloo, nccl, or a backend "
                f"that was registered, of {', '.join(sorted(dist.Backend._plugins))}"
            )
        group._register_backend(torch.device(kind), number, backend)
        group._set_default_backend(number)
        group._set_group_name(f"{self.getGroupName()}/{kind}")
        group._set_group_desc(self.getGroupDesc())
        return group

    def _make_nccl(self, store: dist.Store, wait: timedelta) -> Any:
        if not dist.is_nccl_available():
            raise NotImplementedError("farandole: cuda:nccl beside cpu:farandole: this torch has no NCCL")
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        options.global_ranks_in_group = list(self._names)
        options.group_name = self.getGroupName()
        return dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)

    def _make_plugin(self, name: str, store: dist.Store, wait: timedelta) -> Any:
        plugin = dist.Backend._plugins[name.upper()]
        if not plugin.extended_api:
            return plugin.creator_fn(store, self.rank(), self.size(), wait)
        options: Any = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.timeout = store, wait
        options.group_rank, options.group_size = self.rank(), self.size()
        options.group_id, options.global_ranks_in_group = self.getGroupName(), list(self._names)
        return plugin.creator_fn(options, None)


def _at_the_door(name: str) -> Callable[..., Any]:
    """Return the operation as torch calls it: on any device, for tensors without data, under torch.compile."""
    ours = getattr(ProcessGroup, name)

    @untraced
    def operation(self: DeviceGroup, *arguments: Any, **named: Any) -> Any:
        tensors = _tensors((*arguments, *named.values()))
        if tensors and self._has_no_data(tensors[0]):
            work = GroupWork(name, self.global_ranks[self.rank()], _tensors(arguments[:1]))
            work.end.tell()
            return work
        if not tensors or tensors[0].is_cpu:
            return ours(self, *arguments, **named)
        return getattr(self._group_of(tensors[0].device.type), name)(*arguments, **named)

    operation.__name__, operation.__doc__ = name, ours.__doc__
    return operation


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)  # ranks that are no root of a gather give an empty list first
    return found


for _name in (*_OPERATIONS, "barrier", "monitored_barrier"):
    setattr(DeviceGroup, _name, _at_the_door(_name))

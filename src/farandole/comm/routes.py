"""By which way a bucket travels: flat, hierarchical, shared memory or messages.

[Note: matrices travel flat] A codec of matrices cannot take a slice of a bucket. Its messages are small
anyway, and go among all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.vocabulary.codec_spec import AUTO
from ..core.vocabulary.errors import PlanError
from ..core.vocabulary.spec import Plan, RouteName
from ..core.vocabulary.text import write_notice
from .device.streams import Streams, streams_of
from .device.tested import was_tested
from .messages import Message
from .transport.comm_thread import CommThread
from .transport.group_messages import exchange_by_group
from .transport.rank_group import RankGroup
from .transport.shared_tensor import DeviceSlices, SharedMemory, SlicesByHost, Unavailable
from .transport.staged_conductor import StagedConductor, StagedTransport, StreamConductor
from .transport.transport import LEAST_LIMIT_BYTES, Transport, limit_for
from .world.store_sync import all_gather_json
from .world.world import World

# What buckets travel by in this world: the routes.
#
# - ``flat``: the backend's all-reduce among all ranks; codecs over our own connections.
# - ``shared``: all ranks are on one host and the buckets lie in memory they share.
# - ``hierarchical``: inside each host as shared; across hosts each local rank carries its slice of the
#   bucket, 1/G of it for G ranks a host, by the codec. A host's link then carries 2 (M-1)/M S bytes for M
#   hosts, where a flat ring of the same ranks carries 2 (N-1)/N S.

_CPU = torch.device("cpu")
TRIED_CONNECTIONS = (1, 2, 4)
"""Between two ranks: codec "auto" opens as many as the last says, and measures which number is worth it."""


@dataclass(frozen=True)
class Route:
    """The route of a world, and what it needs."""

    route: RouteName
    reason: str
    """Why this route, for people."""
    group: dist.ProcessGroup
    everyone: RankGroup
    across: RankGroup
    """Those who carry the same slice on other hosts; this rank alone unless the route is hierarchical."""
    memory: SharedMemory | None = None
    """Where buckets lie that are added up inside a host before they go across."""
    conductor: CommThread | None = None
    """Drives everything but the backend's all-reduce; None if nothing else is used."""
    on_device: StreamConductor | None = None
    """Drives codecs where gradients are on an accelerator; None if they are not, or there are no codecs."""
    on_hosts: SlicesByHost | None = None
    """The ranks that exchange slices by codecs on an accelerator; None: all exchange whole buckets."""
    limit_bytes: int = LEAST_LIMIT_BYTES
    """How long a message between two ranks may be."""

    @property
    def circle(self) -> RankGroup:
        """Those who exchange pieces of buckets: all ranks, or those with my slice on other hosts."""
        return self.across if self.route == "hierarchical" else self.everyone

    @property
    def slices(self) -> tuple[RankGroup, SharedMemory | DeviceSlices | None]:
        """The ranks that exchange slices of a bucket by a codec, and what adds it up first; else all, and None."""
        if self.on_hosts is not None:
            return self.on_hosts.across, self.on_hosts.inside
        return (self.across, self.memory) if self.route == "hierarchical" else (self.everyone, None)

    def without_memory(self, reason: str) -> Route:
        """Return the flat route of the same ranks, by the same connections, without memory that is shared."""
        alone = RankGroup((self.everyone.rank,), self.everyone.rank)
        return replace(self, route="flat", reason=reason, across=alone, memory=None)

    def with_messages(self, world: World, plan: Plan, device: torch.device) -> Route:
        """Return the route by which codecs can talk; to be called by all ranks while nothing is on its way.

        `device`: that this rank's gradients are on.
        """
        if streams_of(device) is not None:
            if self.on_device is not None:
                return self
            carrier = connect_device(world, plan, device, group=self.group, everyone=self.everyone,
                                     connect=partial(_staged, world, plan, self.limit_bytes))  # fmt: skip
            return replace(self, on_device=carrier.conductor, on_hosts=carrier.hosts,
                           reason=carrier.reason or self.reason)  # fmt: skip
        if self.conductor is not None and self.conductor.has_transport:
            return self
        transport = _transport(world, plan, self.limit_bytes)
        if self.conductor is not None:
            self.conductor.close()
        return replace(self, conductor=_conductor(transport, self.memory))

    def close(self, world: World) -> None:
        """Close connections, memory and group; `world` made the group."""
        for each in (self.conductor, self.on_device):
            if each is not None:
                each.close()
        if self.memory is not None:
            self.memory.close()
        for group in (self.group, *(() if self.on_hosts is None else self.on_hosts.groups)):
            world.drop_group(group)


def connect_route(
    world: World,
    plan: Plan,
    *,
    needs_messages: bool,
    parameter_bytes: int,
    device: torch.device = _CPU,
) -> Route:
    """Choose the route and connect; to be called by all ranks. `parameter_bytes`: of all gradients.

    `device`: that this rank's gradients are on, or some of them if not all are on the CPU.

    Raises `PlanError`, on all ranks, for a route the plan insists on and this world does not have, and where
    gradients are on an accelerator whose backend has no messages.
    """
    has_streams = streams_of(device) is not None
    place = "an accelerator" if has_streams else device.type
    group = world.new_group(timeout_seconds=plan.timeout_seconds)
    assert group is not None, "lines join more than one rank"
    everyone, limit_bytes = RankGroup(tuple(range(world.size)), world.rank), limit_for(parameter_bytes)
    try:
        if has_streams and (needs_messages or plan.staging == "always"):
            found = connect_device(world, plan, device, group=group, everyone=everyone,
                                   connect=partial(_staged, world, plan, limit_bytes))  # fmt: skip
            try:
                _, reason, _ = _choose(world, plan, place) if found.hosts is None else ("flat", "", None)
            except BaseException:
                found.close(world)
                raise
            alone, reason = RankGroup((world.rank,), world.rank), "; ".join(filter(None, (reason, found.reason)))
            return Route("flat", reason, group, everyone, alone,
                         on_device=found.conductor, on_hosts=found.hosts, limit_bytes=limit_bytes)  # fmt: skip
        route, reason, memory = _choose(world, plan, place)
        across = _across(world, memory) if route == "hierarchical" else RankGroup((world.rank,), world.rank)
        has_messages = needs_messages or route not in ("flat", "shared")
        transport = _transport(world, plan, limit_bytes) if has_messages else None
        conductor = None if transport is None and memory is None else _conductor(transport, memory)
        return Route(route, reason, group, everyone, across, memory, conductor, limit_bytes=limit_bytes)
    except BaseException:
        world.drop_group(group)
        raise


def _across(world: World, memory: SharedMemory | None) -> RankGroup:
    """Return the ranks of all hosts that carry the same slice."""
    places = all_gather_json(world, "places", [world.node_rank, memory.local_rank if memory else 0])
    mine = places[world.rank][1]
    return RankGroup(tuple(rank for rank, (_, local) in enumerate(places) if local == mine), world.rank)


def _staged(world: World, plan: Plan, limit_bytes: int, streams: Streams) -> StagedTransport:
    """Connect all ranks, for tensors of a device."""
    return StagedTransport(world, streams=streams, lanes=plan.connections, **_options(plan, limit_bytes))


def _transport(world: World, plan: Plan, limit_bytes: int) -> Transport:
    """Connect all ranks, by as many connections as the plan, or a tuner, may use."""
    tries = plan.codec == AUTO or world.session.is_tuned
    lanes = max(plan.connections, *TRIED_CONNECTIONS) if tries else plan.connections
    transport = Transport(world, lanes=lanes, **_options(plan, limit_bytes))
    transport.used_lanes = plan.connections
    return transport


def _options(plan: Plan, limit_bytes: int) -> dict[str, Any]:
    return {
        "timeout_seconds": plan.timeout_seconds,
        "limit_bytes": limit_bytes,
        "congestion_control": plan.congestion_control,
    }


def _conductor(transport: Transport | None, memory: SharedMemory | None) -> CommThread:
    """Start the thread that drives `transport` and `memory`."""
    conductor = CommThread(transport, None if memory is None else memory.close)
    if transport is not None and memory is not None:
        memory.while_waiting(conductor.serve_now)  # see [Note: barriers receive too]
    return conductor


def _choose(world: World, plan: Plan, place: str) -> tuple[RouteName, str, SharedMemory | None]:
    wanted = plan.route
    if wanted == "flat":
        return wanted, "the plan says so", None
    shape = all_gather_json(world, "hosts", [world.node_rank, world.device.type if place == "cpu" else place])
    hosts = sorted({node for node, _ in shape})
    sizes = {sum(node == host for node, _ in shape) for host in hosts}
    fitting: RouteName = "shared" if len(hosts) == 1 else "hierarchical"
    problem = ""
    if any(kind != "cpu" for _, kind in shape):
        problem = "the ranks' models are not in CPU memory"
    elif len(sizes) > 1:
        problem = "the hosts have different numbers of ranks"
    elif sizes == {1}:
        problem = "there is one rank a host"
    elif wanted not in ("auto", fitting):
        problem = f"the ranks are on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    if not problem:
        try:
            memory = SharedMemory.connect(world, timeout_seconds=plan.timeout_seconds)
        except Unavailable as reason:
            problem = str(reason)
        else:
            what = "one host" if fitting == "shared" else f"{len(hosts)} hosts of {memory.local_size} ranks"
            return fitting, f"{what}, whose ranks share memory", memory
    if wanted != "auto":
        raise PlanError(f"plan: route = {wanted!r}, but {problem}", remedy='use route "auto" or "flat"')
    return "flat", problem, None


# What codecs travel by where gradients are on an accelerator, and which ranks exchange what.
#
# The backend carries messages from where they are. Where it cannot, or where its way between hosts is slower
# than ours, they go through CPU memory (`transport.staged_conductor`), as the plan's `staging` says. Between
# hosts of several ranks codecs exchange slices: a host adds up first, by the backend.

_MEASURED_BYTES = 2 * 2**20
"""A message to all ranks has so many: what a bucket of a few MiB is when it is packed."""
_ROUNDS = 3
_MARGIN = 0.9
"""The way through CPU memory takes the host's time: it is taken where it needs this part of the other's."""


class DeviceRoute(NamedTuple):
    """What drives codecs on this rank's device."""

    conductor: StreamConductor
    hosts: SlicesByHost | None
    """The ranks that exchange slices; None: all exchange whole buckets."""
    reason: str
    """Why, for people; empty: nothing was chosen."""

    def close(self, world: World) -> None:
        """Let go all that was made for it."""
        self.conductor.close()
        _drop(world, self.hosts)


def connect_device(
    world: World,
    plan: Plan,
    device: torch.device,
    *,
    group: dist.ProcessGroup,
    everyone: RankGroup,
    connect: Callable[[Streams], StagedTransport],
) -> DeviceRoute:
    """Connect what codecs on `device` need; to be called by all ranks.

    `group`: of all ranks, by the backend. `connect`: connects all ranks.
    Raises `PlanError` on all ranks where the backend carries no messages and the plan wants no staging.
    """
    streams = streams_of(device)
    assert streams is not None, "the CPU has a thread instead"
    if everyone.seat.rank == 0 and not was_tested(device):
        write_notice(f"codecs on {device.type}: never tested here: farandole test --device {device.type}")
    hosts = _hosts(world, plan, device)
    with ExitStack() as undo:
        undo.callback(_drop, world, hosts)
        circle, tried, reason = everyone, {everyone: group}, ""
        if hosts is not None:
            circle = hosts.across
            tried[circle] = hosts.groups[0]
            reason = f"{len(circle.ranks)} hosts of {hosts.inside.local_size} ranks, codecs by slices"
        by_backend = StreamConductor(streams, group, tried)
        problem = _first_problem(world, device, tried)
        if problem and plan.staging == "never":
            raise PlanError(
                f"codecs of gradients on {device}: the backend of the ranks does not carry their messages there: "
                f"{problem}",
                remedy='leave staging out, use codec "none", or one GPU a rank, whose backend is NCCL',
            )
        found = DeviceRoute(by_backend, hosts, reason)
        if plan.staging == "always" or problem or (plan.staging == "auto" and not _is_one_host(world)):
            sums = None if plan.staging == "always" else group
            staged = StagedConductor(streams, connect(streams), device=device, everyone=everyone, sums=sums)
            undo.callback(staged.close)
            why = "the plan says so" if plan.staging == "always" else f"the backend carries no messages: {problem}"
            is_staged = plan.staging == "always" or bool(problem)
            if not is_staged:
                is_staged, why = _compare(world, device, circle, by_backend, staged)
            if is_staged:
                found = found._replace(conductor=staged)
            else:
                staged.close()
            way = "through CPU memory" if is_staged else "by the backend"
            found = found._replace(reason=", ".join(filter(None, (reason, f"{way}: {why}"))))
        undo.pop_all()
        return found


def _hosts(world: World, plan: Plan, device: torch.device) -> SlicesByHost | None:
    """Return which ranks exchange slices by codecs on accelerators; None: all exchange whole buckets.

    To be called by all ranks. Where the backend does not add up inside a host, nothing else does.
    """
    if plan.route not in ("auto", "hierarchical"):
        return None
    nodes = all_gather_json(world, "hosts of accelerators", world.node_rank)
    local_size = nodes.count(nodes[0])
    hosts = [tuple(range(world.size))[begin : begin + local_size] for begin in range(0, world.size, local_size)]
    is_even = all([nodes[rank] for rank in each] == [nodes[each[0]]] * local_size for each in hosts)
    if local_size < 2 or len(hosts) < 2 or len(hosts) != len(set(nodes)) or not is_even:
        return None
    inside = RankGroup(hosts[world.rank // local_size], world.rank)
    place = inside.seat.rank
    across = RankGroup(tuple(each[place] for each in hosts), world.rank)
    cross, node = world.new_host_groups(local_size, timeout_seconds=plan.timeout_seconds)
    found = SlicesByHost(across, DeviceSlices(inside.seat, node, device), (cross, node))
    if _first_problem(world, device, {inside: node}):
        _drop(world, found)
        return None
    return found


def _drop(world: World, hosts: SlicesByHost | None) -> None:
    for each in () if hosts is None else hosts.groups:
        world.drop_group(each)


def _first_problem(world: World, device: torch.device, tried: Mapping[RankGroup, dist.ProcessGroup]) -> str:
    """Return why some rank's backend does not carry messages on `device`, the same on all; empty: all do.

    To be called by all ranks. A group is connected by its first exchange.
    """
    problem = ""
    try:
        for circle, group in tried.items():
            rows = torch.zeros(circle.seat.size, dtype=torch.uint8, device=device)
            exchange_by_group(Message(rows, "all_to_all"), circle.seat, group)
            exchange_by_group(Message(rows, "all_gather"), circle.seat, group)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    return next((each for each in all_gather_json(world, "messages of devices", problem) if each), "")


def _is_one_host(world: World) -> bool:
    return len(set(all_gather_json(world, "hosts to stage between", world.node_rank))) == 1


def _compare(
    world: World, device: torch.device, circle: RankGroup, by_backend: StreamConductor, staged: StreamConductor
) -> tuple[bool, str]:
    """Return whether the way through CPU memory is taken, and why; the same on all ranks."""
    backend_seconds, staged_seconds = _seconds_of_both(world, device, circle, by_backend, staged)
    why = (
        f"{_MEASURED_BYTES >> 20} MiB take {1e3 * staged_seconds:.3g} ms through CPU memory, "
        f"{1e3 * backend_seconds:.3g} ms by the backend"
    )
    return staged_seconds < _MARGIN * backend_seconds, why


def _seconds_of_both(
    world: World, device: torch.device, circle: RankGroup, by_backend: StreamConductor, staged: StreamConductor
) -> tuple[float, float]:
    """Return the seconds of one exchange by the backend and through CPU memory, the same on all ranks."""
    rows = torch.zeros(circle.seat.size, _MEASURED_BYTES // circle.seat.size, dtype=torch.uint8, device=device)
    message = Message(rows, "all_to_all")
    rounds = [[way.seconds_of(message, circle) for way in (by_backend, staged)] for _ in range(1 + _ROUNDS)]
    mine = [statistics.median(each) for each in zip(*rounds[1:], strict=True)]  # the first round warms up
    backend_seconds, staged_seconds = (
        max(each) for each in zip(*all_gather_json(world, "ways of messages", mine), strict=True)
    )
    return backend_seconds, staged_seconds

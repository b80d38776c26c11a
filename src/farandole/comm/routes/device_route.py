"""What codecs travel by where gradients are on an accelerator, and which ranks exchange what.

The backend carries messages from where they are. Where it cannot, or where its way between hosts is slower than
ours, they go through CPU memory (`transport.staged_conductor`), as the plan's `staging` says. Between hosts of
several ranks codecs exchange slices: a host adds up first, by the backend.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.spec import Plan
from ..device.streams import Streams, streams_of
from ..device.tested import was_tested
from ..host_memory.device_slices import DeviceSlices, SlicesByHost
from ..messages.message import Message
from ..transport.group_messages import exchange_by_group
from ..transport.rank_group import RankGroup
from ..transport.staged_conductor import StagedConductor, StagedTransport
from ..transport.stream_conductor import StreamConductor
from ..world.store_sync import all_gather_json
from ..world.world import World

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

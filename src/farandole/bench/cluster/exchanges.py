"""The collectives of each tier, as a run makes them, and what they cost.

[Note: exchanges as in a run] Sums of gradients go by the reducer's routes: memory that the ranks of a host share;
across hosts the backend's all-reduce with one rank a host, and else our connections, each local rank with its
part. Everything else goes by the groups that `parallel` makes: our own backend for CPU tensors, the world's
for an accelerator, and point-to-point messages of a pipeline by the world's. Groups across hosts have one
rank of each host, and all of them exchange at once: [Note: links that ranks share].

[Note: links with credit] A switch's buffer, and the bucket of a shaped link, take the first bytes after a pause at
any speed. So short exchanges are repeated for as long as the time allows, in one direction, until that credit is
a small part of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ... import backend as _registered
from ...comm.transport.host_memory import Unavailable
from ...comm.transport.shared_tensor import SharedMemory, SharedTensor
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster import OPERATIONS, CollectiveCost, Tier, collective_work
from ...core.vocabulary.errors import ConfigError
from ..own_routes import Connections, make_sums
from .rounds import LEAST_ROUNDS, SAMPLE_SECONDS, Case, SizedExchange, affordable, fit_cost, sample, slowest, timed

SIZES = (4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20)
FEW_SIZES = (4 * 2**10, 512 * 2**10, 4 * 2**20)
"""Where there is little time: a bandwidth needs a size that is not all latency."""
_LEAST_FAMILY_SECONDS = 0.5
_LONG_SAMPLE_SECONDS = 0.05
"""See [Note: links with credit]."""
_ACKNOWLEDGED_ROUNDS = 2
"""A send is the message, and the receiver's answer."""
Run = Callable[[torch.Tensor], object]


@dataclass
class TierExchanges:
    """The ranks of one tier, and how they exchange. A tier of one rank has no exchanges."""

    name: str
    ranks: int
    """As in `Tier`: all that reach each other through this tier or one inside of it."""
    width: int
    """Ranks of one group."""
    runs: Mapping[str, Run] = field(default_factory=dict)


def open_tiers(world: World) -> list[TierExchanges]:
    """Connect the tiers of this world; called by all ranks. `ConfigError`, on all ranks, for unequal hosts."""
    if world.size == 1:
        return [TierExchanges("host", 1, 1)]
    sizes = sorted(set(all_gather_json(world, "measure/hosts", world.local_size)))
    if len(sizes) > 1:
        raise ConfigError(
            f"the hosts have {' and '.join(map(str, sizes))} ranks: tiers need equally many on each",
            remedy="give each host the same number of slots: -H a:4,b:4",
        )
    is_cpu = world.device.type == "cpu"
    own = "farandole" if is_cpu else None
    if own is not None:
        _registered.register()
    if world.node_count > 1 and world.local_size > 1:
        across, inside = world.new_host_groups(backend=own)
        across_pairs, inside_pairs = world.new_host_groups()
        inside_sum = _shared_sum(world) if is_cpu else None
        across_sum = _sum_across(world, across) if is_cpu else None
        return [
            _tier("host", world.local_size, group=inside, pairs=inside_pairs, own_sum=inside_sum),
            _tier("network", world.size, group=across, pairs=across_pairs, own_sum=across_sum),
        ]
    group, pairs = world.new_group(backend=own), world.new_group()
    assert group is not None, "several ranks have a group"
    assert pairs is not None, "several ranks have a group"
    if world.node_count == 1:
        return [
            _tier("host", world.size, group=group, pairs=pairs, own_sum=_shared_sum(world) if is_cpu else None)
        ]

    def flat_sum(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=pairs)

    network = _tier("network", world.size, group=group, pairs=pairs, own_sum=flat_sum if is_cpu else None)
    return [TierExchanges("host", 1, 1), network]


def measure_tiers(world: World, tiers: list[TierExchanges], seconds: float) -> tuple[Tier, ...]:
    """Return the tiers with what their collectives cost. Called by all ranks, which get the same answer."""
    count = sum(len(tier.runs) for tier in tiers)
    if not count:
        return tuple(Tier(tier.name, tier.ranks, {}) for tier in tiers)
    family_seconds = 0.6 * seconds / count  # probing runs each size twice before
    sizes = SIZES if family_seconds >= _LEAST_FAMILY_SECONDS else FEW_SIZES
    families = [
        (tier, operation, [_case(operation, tier, nbytes, world.device) for nbytes in sizes])
        for tier in tiers
        for operation in tier.runs
    ]
    longest = family_seconds / (2 * LEAST_ROUNDS * len(sizes))
    sample_seconds = min(_LONG_SAMPLE_SECONDS, max(SAMPLE_SECONDS, longest))
    kept = [affordable(world, family, family_seconds, sample_seconds=sample_seconds) for _, _, family in families]
    found = iter(sample(world, [case for cases in kept for case in cases], 0.6 * seconds))
    costs: dict[tuple[str, str], CollectiveCost] = {}
    for (tier, operation, _), cases in zip(families, kept, strict=True):
        exchanged = []
        for case in cases:
            work = collective_work(operation, tier.width, case.work)
            rounds = _ACKNOWLEDGED_ROUNDS if operation == "send" else work.rounds
            exchanged.append(SizedExchange(work.sent_bytes, rounds, tuple(slowest(next(found)))))
        costs[tier.name, operation] = fit_cost(exchanged)
    return tuple(
        Tier(tier.name, tier.ranks, {each: costs[tier.name, each] for each in tier.runs}) for tier in tiers
    )


def elements_of(nbytes: int, width: int) -> int:
    """Return a number of float32 elements that so many ranks divide."""
    return max(1, -(-nbytes // (4 * width))) * width


def _case(operation: str, tier: TierExchanges, nbytes: int, device: torch.device) -> Case:
    count = elements_of(nbytes, tier.width)
    run = tier.runs[operation]
    tensor = torch.zeros(count, dtype=torch.float32, device=device)
    return Case(f"{tier.name} {operation}", 4.0 * count, timed(lambda: run(tensor), device))


def _tier(
    name: str, ranks: int, *, group: dist.ProcessGroup, pairs: dist.ProcessGroup, own_sum: Run | None
) -> TierExchanges:
    """Return a tier of `group`; `own_sum`: how gradients are summed, None: by the group too."""
    width, first = group.size(), dist.get_process_group_ranks(group)[0]
    parts = _Parts(width)

    def all_gather(tensor: torch.Tensor) -> None:
        _single("all_gather")(parts.whole(tensor), parts.mine(tensor), group=group)

    def reduce_scatter(tensor: torch.Tensor) -> None:
        _single("reduce_scatter")(parts.mine(tensor), tensor, group=group)

    runs: dict[str, Run] = {
        "all_reduce": own_sum or (lambda tensor: dist.all_reduce(tensor, group=group)),
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": lambda tensor: dist.all_to_all_single(parts.whole(tensor), tensor, group=group),
        "broadcast": lambda tensor: dist.broadcast(tensor, src=first, group=group),
        "send": _pair_send(pairs),
    }
    assert tuple(runs) == OPERATIONS, "every operation is measured"
    return TierExchanges(name, ranks, width, runs)


def _pair_send(group: dist.ProcessGroup) -> Run:
    """Return a send from even to odd ranks, all pairs at once, and a short answer; an odd last rank is idle."""
    ranks = dist.get_process_group_ranks(group)
    is_sender = group.rank() % 2 == 0
    peer = group.rank() ^ 1
    answers: dict[torch.device, torch.Tensor] = {}

    def send(tensor: torch.Tensor) -> None:
        if peer >= len(ranks):
            return
        answer = answers.setdefault(tensor.device, torch.zeros(1, dtype=torch.float32, device=tensor.device))
        if is_sender:
            dist.send(tensor, ranks[peer], group=group)
            dist.recv(answer, ranks[peer], group=group)
        else:
            dist.recv(tensor, ranks[peer], group=group)
            dist.send(answer, ranks[peer], group=group)

    return send


def _shared_sum(world: World) -> Run | None:
    """Return the sum inside of a host as buckets have it: copied into memory of all its ranks, summed there."""
    try:
        memory = SharedMemory.connect(world, timeout_seconds=world.timeout_seconds)
    except Unavailable:
        return None
    rooms: dict[int, SharedTensor] = {}

    def run(tensor: torch.Tensor) -> None:
        if tensor.numel() not in rooms:
            rooms[tensor.numel()] = memory.allocate(tensor.numel(), tensor.dtype)
        shared = rooms[tensor.numel()]
        shared.mine[: tensor.numel()].copy_(tensor)
        shared.all_reduce()

    return run


def _sum_across(world: World, group: dist.ProcessGroup) -> Run:
    """Return the sum among the ranks with my place on all hosts, by our connections."""
    connections = Connections(world)
    return make_sums(connections, dist.get_process_group_ranks(group), world.rank)


class _Parts:
    """Room for results, the same for the same length."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._wholes: dict[int, torch.Tensor] = {}

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return room as large as `tensor`."""
        if tensor.numel() not in self._wholes:
            self._wholes[tensor.numel()] = torch.empty_like(tensor)
        return self._wholes[tensor.numel()]

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return room for one rank's part of `tensor`."""
        return self.whole(tensor)[: tensor.numel() // self._width]


def _single(name: str) -> Callable[..., object]:
    """Return torch's collective on one tensor: it has a new name from 2.13 on."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    found: Callable[..., object] = getattr(dist, f"{name}_single", None) or getattr(dist, old)
    return found

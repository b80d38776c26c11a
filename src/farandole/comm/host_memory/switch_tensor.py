"""Ranks behind one switch add up among themselves before anything crosses to another switch.

Where switches are joined by a link that is slower than their own ports together, a step waits for that link.
A bucket is cut into one slice a rank of the group: each rank adds up its slice of all of them, exchanges
it with those who carry the same slice behind other switches, and gives the result back to its group. So 1/G of the
bucket of every rank crosses, for G ranks a switch.

`SwitchGroup` is to messages what `shared_memory.SharedMemory` is to one host, and has the same methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count

import torch

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.spec import Plan
from ..messages.reduce_rules import sum_into
from ..transport.rank_group import PieceExchange, RankGroup
from ..transport.transport import Transport
from ..world.store_sync import all_gather_json
from ..world.world import World

_FIRST_TAG = 2**40
"""Above those of a conductor's jobs."""


class SwitchGroup:
    """The ranks behind this rank's switch. Its tensors are used by the thread that drives `transport`."""

    def __init__(self, transport: Transport, circle: RankGroup) -> None:
        self._transport = transport
        self._circle = circle
        self._tags = count(_FIRST_TAG)
        self.local_rank = circle.seat.rank
        self.local_size = circle.seat.size

    def allocate(self, elements: int, dtype: torch.dtype) -> SwitchTensor:
        """Return a tensor of zeros that every rank of the group has one like."""
        return SwitchTensor(self, torch.zeros(elements, dtype=dtype))

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> int:
        """Send each of the group its tensor and fill what each of them sends; return the bytes sent."""
        flight = self._transport.start_parts(PieceExchange(outgoing, incoming), next(self._tags), self._circle)
        flight.wait()
        return flight.sent_bytes

    def close(self) -> None:
        """Do nothing: the transport is its driver's."""


class SwitchTensor:
    """One flat tensor a rank, added up slice by slice. Made by `SwitchGroup.allocate`."""

    def __init__(self, group: SwitchGroup, mine: torch.Tensor) -> None:
        self.mine = mine
        """This rank's own, (elements,)."""
        self.local_rank = group.local_rank
        self.sent_bytes = 0
        """By this rank to its group, in the last `reduce_scatter` and `all_gather`."""
        self._group = group
        self._slices = self._cut()

    def _cut(self) -> list[torch.Tensor]:
        return [self.mine[slice(*self.slice_bounds(rank))] for rank in range(self._group.local_size)]

    def leave_memory(self) -> None:
        """Go on in fresh memory, of zeros: others hold parts of `mine`."""
        self.mine = torch.zeros_like(self.mine)
        self._slices = self._cut()

    def slice_bounds(self, local_rank: int) -> tuple[int, int]:
        """Return where that rank's slice begins and ends, in elements; the last may be short or empty."""
        elements = self.mine.numel()
        length = -(-elements // self._group.local_size)
        return min(local_rank * length, elements), min((local_rank + 1) * length, elements)

    def reduce_scatter(self, divisor: int = 1) -> torch.Tensor:
        """Return my slice of `mine`, with the sum of all ranks' over `divisor` in it; the rest is as it was."""
        mine = self._slices[self.local_rank]
        rows = [torch.empty_like(mine) for _ in self._slices]
        self.sent_bytes = self._group.exchange(self._slices, rows)
        if mine.numel():
            after_me, before_me = rows[self.local_rank + 1 :], rows[: self.local_rank]
            sum_into(mine, [mine, *after_me, *before_me], divisor)
        return mine

    def all_gather(self) -> None:
        """Put every rank's slice into all others' `mine`."""
        # A copy is sent: a rank with all slices goes on, while its own may still wait for a slow link.
        mine = self._slices[self.local_rank].clone()
        self.sent_bytes += self._group.exchange([mine] * len(self._slices), self._slices)


def switch_circles(world: World, plan: Plan) -> tuple[RankGroup, RankGroup] | None:
    """Return the ranks behind my switch, and those behind others that carry my slice; None: the plan names none.

    To be called by all ranks. Raises `PlanError`, on all of them, for switches that this world does not have.
    """
    if not (plan.ranks_per_switch or plan.switch_of):
        return None
    seen = all_gather_json(world, "switches", [world.host, world.device.type])
    switches: dict[str, list[int]] = {}
    for rank, (host, kind) in enumerate(seen):
        if kind != "cpu":
            raise PlanError(
                f"plan: switches are named, but the model of rank {rank} is not in CPU memory",
                remedy="leave ranks_per_switch and switch_of out: NCCL knows its own topology",
            )
        name = str(rank // plan.ranks_per_switch) if plan.ranks_per_switch else _switch_of(host, plan.switch_of)
        switches.setdefault(name, []).append(rank)
    groups = list(switches.values())
    if len({len(group) for group in groups}) > 1 or len(groups) < 2 or len(groups[0]) < 2:
        said = "; ".join(name_ranks(group) for group in groups)
        raise PlanError(
            f"plan: the switches have {said}", remedy="expected two switches or more, of two ranks or more, alike"
        )
    inside = next(group for group in groups if world.rank in group)
    place = inside.index(world.rank)
    across = sorted(group[place] for group in groups)
    return RankGroup(tuple(inside), world.rank), RankGroup(tuple(across), world.rank)


def _switch_of(host: str, switch_of: Mapping[str, str]) -> str:
    fitting = [switch for pattern, switch in switch_of.items() if fnmatchcase(host, pattern)]
    if not fitting:
        patterns = ", ".join(map(repr, switch_of))
        raise PlanError(f"plan: switch_of has no pattern for host {host!r}, only {patterns}")
    return fitting[-1]

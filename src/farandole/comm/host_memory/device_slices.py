"""All-reduce among the ranks of one host, for tensors on their devices, by collectives of the backend.

It is `shared_tensor` where the ranks have a group instead of memory: each gets all parts of its slice, adds them
up in the same order, and sends the sum to the others, so that all have the same bits. In bytes that is a
reduce-scatter and an all-gather. Nothing waits on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...core.step_model.comm_cost import ring_sent_bytes
from ..messages.message import GroupRank, Message
from ..messages.reduce_rules import sum_into
from ..transport.group_messages import exchange_by_group
from ..transport.rank_group import RankGroup


@dataclass(frozen=True)
class DeviceSlices:
    """The ranks of this rank's host. Its tensors are used on the stream that gradients travel on."""

    seat: GroupRank
    group: dist.ProcessGroup
    device: torch.device

    @property
    def local_size(self) -> int:
        """Ranks of the host."""
        return self.seat.size

    def allocate(self, elements: int, dtype: torch.dtype) -> DeviceSliceTensor:
        """Return a tensor of zeros that every rank of the host has one like. `elements` divide by the ranks."""
        return DeviceSliceTensor(self, torch.zeros(elements, dtype=dtype, device=self.device))

    def exchange(self, message: Message) -> torch.Tensor:
        """Exchange a message with the host's ranks, and return what is received."""
        return exchange_by_group(message, self.seat, self.group)


@dataclass(frozen=True)
class SlicesByHost:
    """How codecs exchange where hosts have several ranks with accelerators: inside each host first."""

    across: RankGroup
    """Those who carry the same slice on other hosts."""
    inside: DeviceSlices
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    """The group of `across`, and that of this host."""


class DeviceSliceTensor:
    """One flat tensor a rank, added up slice by slice. Made by `DeviceSlices.allocate`."""

    def __init__(self, slices: DeviceSlices, mine: torch.Tensor) -> None:
        self.mine = mine
        """This rank's own, (elements,)."""
        self.local_rank = slices.seat.rank
        self.sent_bytes = ring_sent_bytes(mine.nbytes, slices.local_size, passes=2)
        """By this rank to those of its host, in `reduce_scatter` and `all_gather`."""
        self._slices = slices

    def leave_memory(self) -> None:
        """Go on in fresh memory, of zeros: others hold parts of `mine`."""
        self.mine = torch.zeros_like(self.mine)

    def slice_bounds(self, local_rank: int) -> tuple[int, int]:
        """Return where that rank's slice begins and ends, in elements."""
        length = self.mine.numel() // self._slices.local_size
        return local_rank * length, (local_rank + 1) * length

    def reduce_scatter(self, divisor: int = 1) -> torch.Tensor:
        """Return my slice of `mine`, with the sum of all ranks' over `divisor` in it; the rest is as it was."""
        mine = self.mine.view(self._slices.local_size, -1)
        rows = self._slices.exchange(Message(mine, "all_to_all"))
        after_me, before_me = rows[self.local_rank + 1 :], rows[: self.local_rank]
        own = mine[self.local_rank]
        sum_into(own, [own, *after_me, *before_me], divisor)
        return own

    def all_gather(self) -> None:
        """Put every rank's slice into all others' `mine`."""
        own = self.mine.view(self._slices.local_size, -1)[self.local_rank]
        self.mine.copy_(self._slices.exchange(Message(own, "all_gather")).view(-1))

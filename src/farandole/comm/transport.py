"""Messages between ranks, piece by piece, over point-to-point sends of the group's back end.

[Note: segments] One large piece a peer reaches half of a link (measured with gloo); the same bytes in
pieces of 64-256 KB, several in flight, reach 0.95-0.99 of it. So long rows are cut here, and short ones
come from whoever cuts a bucket into segments. Every send has a tag of its own, so nothing depends on the
order in which ranks get there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .codecs.message import Message, Seat, received_shape

_SendOrReceive = Callable[[list[torch.Tensor], int, int], dist.Work]

SEGMENT_BYTES = 256 * 1024
CHUNK_TAGS = 32
"""Pieces a row is cut into at most; each has its own tag."""


@dataclass(eq=False, slots=True)
class Flight:
    """One message on its way."""

    received: torch.Tensor
    sent_bytes: int
    _works: list[dist.Work]
    _kept: list[torch.Tensor] = field(default_factory=list)
    """What is being sent must live until it is."""

    def wait(self) -> torch.Tensor:
        """Return what was received; raise what the back end raises."""
        for work in self._works:
            work.wait()
        return self.received


class Transport:
    """Sends messages among the ranks of one process group, which nobody else uses for point-to-point sends."""

    def __init__(self, group: dist.ProcessGroup, seat: Seat) -> None:
        self._group = group
        self.seat = seat

    def start(self, message: Message, tag: int) -> Flight:
        """Send `message`, an exchange or a gather, under `tag` (and the `CHUNK_TAGS - 1` after it)."""
        seat = self.seat
        tensor = message.tensor.contiguous()
        received = torch.empty(received_shape(message, seat), dtype=tensor.dtype, device=tensor.device)
        gather = message.operation == "gather"
        works: list[dist.Work] = []
        sent = 0
        mine = tensor if gather else tensor[seat.rank]
        received[seat.rank].copy_(mine)
        for step in range(1, seat.size):
            source = (seat.rank - step) % seat.size
            works += self._cut(received[source], self._group.recv, source, tag)
        for step in range(1, seat.size):
            target = (seat.rank + step) % seat.size
            row = tensor if gather else tensor[target]
            works += self._cut(row, self._group.send, target, tag)
            sent += row.numel() * row.element_size()
        return Flight(received, sent, works, [tensor])

    @staticmethod
    def _cut(row: torch.Tensor, operation: _SendOrReceive, peer: int, tag: int) -> list[dist.Work]:
        if row.numel() == 0:
            return []
        flat = row.view(-1)
        nbytes = flat.numel() * flat.element_size()
        if nbytes <= SEGMENT_BYTES:
            return [operation([flat], peer, tag)]
        pieces = min(CHUNK_TAGS, -(-nbytes // SEGMENT_BYTES))
        return [operation([piece], peer, tag + i) for i, piece in enumerate(flat.chunk(pieces))]

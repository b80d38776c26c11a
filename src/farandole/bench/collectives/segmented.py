"""Reduce-scatter, all-gather and all-reduce of our own, over point-to-point sends in segments.

For tensors in CPU memory and groups with gloo. Received segments are summed while later
segments are on the wire, and a reduced segment is sent on at once: an all-reduce is one pipeline,
and not two phases.

[Note: segments] One large piece a peer reaches half of a link with gloo's sends (measured); the same bytes in
pieces of 64-256 KB, several in flight, reach 0.93-0.99 of it.

[Note: sums in rank order] Every element is summed from rank 0 to the last, whichever rank sums it and whatever
arrived first, in float32 for floats of 16 bits and less. So all ranks end with the same bits, on every run.

[Note: two tags are enough] Messages between two ranks under one tag arrive in the order of their sending
(gloo), and both sides go through segments in the same order. Collectives of one group must be called in
the same order by all ranks, one at a time, and no other code may send under these tags in that group.

A backend's failure (a rank that is gone, a time-out) is its own RuntimeError; `wire.explain` translates it.
Ranks must agree on sizes and types beforehand: see [Note: agree first].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...comm.messages.reduce_rules import accumulates_in_fp32
from .fitting import check_pair, check_sum

SEGMENT_BYTES = 192 * 1024
WINDOW = 8
"""Segments a rank is ready to receive from each peer. With 4, or with 12, a busy machine fills its link less."""
ONE_ROUND_BYTES = 64 * 1024
"""An all-reduce for which each rank sends at most this much is one all-to-all round."""

_SCATTER_TAG = 2**30 + 1
_GATHER_TAG = 2**30 + 2
"""Above all tags of the conductor."""


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add `tensor` up over the ranks of `group`, in place.

    Sends 2 (N-1)/N S bytes; (N-1) S where that is the same (two ranks) or little. Raises `ValueError` for a
    tensor that cannot be summed or is not in CPU memory.
    """
    wire = _Wire(group)
    check_sum(tensor)
    if wire.size == 1 or tensor.numel() == 0:
        return
    flat = tensor.contiguous().view(-1)
    if wire.size == 2 or (wire.size - 1) * flat.nbytes <= ONE_ROUND_BYTES:
        _sum_everywhere(flat, wire)
    else:
        chunk = -(-flat.numel() // wire.size)
        starts = range(0, chunk * wire.size, chunk)
        chunks = [flat[start : start + chunk] for start in starts]
        _sum_chunks(chunks, chunks[wire.rank], wire, everywhere=True)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


@torch.no_grad()
def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    group: dist.ProcessGroup,
) -> None:
    """Sum the `input` of all ranks, N times the size of `output`; part `rank` of it is the output.

    Sends (N-1)/N of the input's bytes. The output may be this rank's part of the input. Raises `ValueError`
    for shapes, types or places that do not fit, before anything is sent.
    """
    wire = _Wire(group)
    check_sum(input)
    check_pair("reduce_scatter", whole=input, part=output, names=("input", "output"), size=wire.size)
    chunks = list(input.view(wire.size, -1)) if input.numel() else []
    if wire.size == 1:
        output.view(-1).copy_(input.view(-1))
    elif chunks:
        _sum_chunks(chunks, output.view(-1), wire, everywhere=False)


@torch.no_grad()
def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:  # noqa: A002 - torch's name
    """Concatenate the `input` of all ranks into `output`, N times its size, in rank order.

    Sends (N-1)/N of the output's bytes. The input may be this rank's part of the output. Raises `ValueError`
    for shapes, types or places that do not fit, before anything is sent.
    """
    wire = _Wire(group)
    check_pair("all_gather", whole=output, part=input, names=("output", "input"), size=wire.size)
    if input.numel() == 0:
        return
    rows = output.view(wire.size, -1)
    mine = input.view(-1)
    if rows[wire.rank].data_ptr() != mine.data_ptr():
        rows[wire.rank].copy_(mine)
    flights: deque[list[dist.Work]] = deque()
    for start, stop in _segments(mine.numel(), mine.element_size()):
        if len(flights) == WINDOW:
            _wait(flights.popleft())
        works = [wire.receive(rows[peer, start:stop], peer, _GATHER_TAG) for peer in wire.sources]
        works += [wire.send(mine[start:stop], peer, _GATHER_TAG) for peer in wire.targets]
        flights.append(works)
    for works in flights:
        _wait(works)


class _Wire:
    """The point-to-point sends of one group, seen from this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()
        # Each rank starts with another peer, so that no link is the first of all ranks.
        self.targets = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.sources = [(self.rank - step) % self.size for step in range(1, self.size)]

    def send(self, piece: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work: dist.Work = self._group.send([piece], peer, tag)
        return work

    def receive(self, piece: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work: dist.Work = self._group.recv([piece], peer, tag)
        return work


@dataclass(slots=True)
class _Flight:
    """One segment on its way to being added up."""

    rows: list[torch.Tensor]
    """Those of all ranks, in rank order."""
    received: list[dist.Work]
    sent: list[dist.Work]


def _sum_everywhere(flat: torch.Tensor, wire: _Wire) -> None:
    """All-to-all: every rank sends everything to all others and sums."""
    rooms = _Rooms(flat, wire)
    flights: deque[tuple[torch.Tensor, _Flight]] = deque()

    def land() -> None:
        mine, flight = flights.popleft()
        _wait(flight.received)
        _wait(flight.sent)  # the sum takes the place of what was sent
        _add(flight.rows, mine)

    for start, stop in _segments(flat.numel(), flat.element_size()):
        if len(flights) == WINDOW:
            land()
        mine = flat[start:stop]
        rows = rooms.rows(mine)
        received = [wire.receive(rows[peer], peer, _SCATTER_TAG) for peer in wire.sources]
        sent = [wire.send(mine, peer, _SCATTER_TAG) for peer in wire.targets]
        flights.append((mine, _Flight(rows, received, sent)))
    while flights:
        land()


def _sum_chunks(chunks: Sequence[torch.Tensor], output: torch.Tensor, wire: _Wire, *, everywhere: bool) -> None:
    """Sum this rank's chunk over all ranks into `output`; `everywhere`: send it on, and receive the others.

    Handing on happens in place. A chunk's segment is overwritten by its sum only after its owner has received
    what this rank sent of it, so the send is over.
    """
    rooms = _Rooms(chunks[wire.rank], wire)
    flights: deque[tuple[torch.Tensor, _Flight]] = deque()
    rest: list[dist.Work] = []

    def land() -> None:
        total, flight = flights.popleft()
        _wait(flight.received)
        if total.numel():
            _add(flight.rows, total)
        if everywhere and total.numel():
            rest.extend(wire.send(total, peer, _GATHER_TAG) for peer in wire.targets)
        rest.extend(flight.sent)

    for start, stop in _segments(chunks[0].numel(), chunks[0].element_size()):
        if len(flights) == WINDOW:
            land()
        pieces = [chunk[start:stop] for chunk in chunks]
        mine = pieces[wire.rank]
        rows = rooms.rows(mine)
        # The last rank's chunk may be shorter: what is empty does not travel.
        received = [wire.receive(rows[peer], peer, _SCATTER_TAG) for peer in wire.sources if mine.numel()]
        if everywhere:
            rest += [
                wire.receive(pieces[peer], peer, _GATHER_TAG) for peer in wire.sources if pieces[peer].numel()
            ]
        sent = [wire.send(pieces[peer], peer, _SCATTER_TAG) for peer in wire.targets if pieces[peer].numel()]
        flights.append((output[start:stop], _Flight(rows, received, sent)))
    while flights:
        land()
    _wait(rest)


class _Rooms:
    """Room for what `WINDOW` segments receive, used in turn."""

    def __init__(self, chunk: torch.Tensor, wire: _Wire) -> None:
        length = min(chunk.numel(), _segment_elements(chunk.element_size()))
        self._wire = wire
        self._room = torch.empty(WINDOW, wire.size - 1, length, dtype=chunk.dtype)
        self._turn = 0

    def rows(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of all ranks, in rank order: `mine`, and room for the others."""
        room = self._room[self._turn % WINDOW, :, : mine.numel()]
        self._turn += 1
        rows = list(room)
        rows.insert(self._wire.rank, mine)
        return rows


def _segment_elements(element_size: int) -> int:
    return max(1, SEGMENT_BYTES // element_size)


def _segments(count: int, element_size: int) -> Iterator[tuple[int, int]]:
    length = _segment_elements(element_size)
    return ((start, min(start + length, count)) for start in range(0, count, length))


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _add(rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of `rows` to `out`, which may be one of them. See [Note: sums in rank order]."""
    if accumulates_in_fp32(out.dtype):
        total = rows[0].float()
        for row in rows[1:]:
            total += row.float()
        out.copy_(total)
        return
    total = rows[0]
    for row in rows[1:-1]:
        total = total + row
    torch.add(total, rows[-1], out=out)

"""The ranks of one pipeline, and small values that they tell each other.

[Note: a line a direction] NCCL does what a group is told in order, also sends and receives: a receive that was
posted ahead holds up a send to another rank, and two neighbours that send first wait for each other for ever. So
on accelerators each rank has a group of two for what it sends to a neighbour, and nothing else goes there. The
first send or receive of a group waits on the host until its other side has come: both make it when lines are made,
all ranks in one order of lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...comm.device.accelerator import is_accelerator
from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from ...core.environ.nccl import expect_single_sends
from ...core.vocabulary.errors import Mismatch

_TEXT_BYTES = 8192


@dataclass(eq=False)
class PipelinePeers:
    """The ranks of one pipeline, seen from one of them."""

    here: World
    group: dist.ProcessGroup | None
    """None for a pipeline of one rank."""
    index: int
    """This rank's, from 0 at the inputs."""
    size: int
    lines: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    """By sender and receiver, of which this rank is one. See [Note: a line a direction]."""

    def line(self, sender: int, receiver: int) -> tuple[dist.ProcessGroup | None, int, int]:
        """Return the group that `sender` sends to `receiver` by, and the numbers of both in it."""
        if not self.lines:
            return self.group, sender, receiver
        is_up = receiver > sender
        return self.lines[sender, receiver], int(not is_up), int(is_up)

    def agree(self, numbers: dict[str, int], remedies: dict[str, str]) -> None:
        """Raise `Mismatch`, on every rank, naming the first of `numbers` that is not the same on all ranks."""
        if self.size > 1:
            PeerAgreement(self, numbers, remedies).check()

    def broadcast_json(self, value: Any, source: int) -> Any:
        """Return what the rank `source` of the pipeline gave as `value`."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode().ljust(_TEXT_BYTES) if self.index == source else b" " * _TEXT_BYTES
        assert len(text) == _TEXT_BYTES, f"a value of {len(text)} bytes"
        buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.here.device)
        with translated(self.here, "shapes between stages"):
            dist.broadcast(buffer, group=self.group, group_src=source)
        return json.loads(bytes(buffer.cpu().tolist()))

    def add_number(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors `value` of all ranks of the pipeline."""
        if self.size > 1:
            with translated(self.here, "the losses of all stages"):
                dist.all_reduce(value, group=self.group)
        return value

    def broadcast_number(self, value: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor `value` of the rank `source` of the pipeline."""
        if self.size > 1:
            with translated(self.here, "the loss of the last stage"):
                dist.broadcast(value, group=self.group, group_src=source)
        return value


def needs_lines(device: torch.device) -> bool:
    """Return whether groups of `device` do what they are told in order. See [Note: a line a direction]."""
    return is_accelerator(device)


def make_lines(part: World) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Make groups for all neighbours of a ring, and return those of this rank; called by all ranks of `part`."""
    expect_single_sends()
    ranks, lines = part.size, {}
    for sender in range(ranks):
        for receiver in sorted({(sender + 1) % ranks, (sender - 1) % ranks}):
            made = part.new_group(ranks=sorted((sender, receiver)))
            if made is not None:
                lines[sender, receiver] = made
                _open_line(part, made, is_sender=part.rank == sender, number=int(sender > receiver))
    return lines


def _open_line(part: World, line: dist.ProcessGroup, *, is_sender: bool, number: int) -> None:
    """Send the first bytes. `number`: of the sender in the group."""
    word = torch.zeros(1, device=part.device)
    with translated(part, "connecting two stages"):
        if is_sender:
            dist.send(word, group=line, group_dst=1 - number)
        else:
            dist.recv(word, group=line, group_src=number)


class PeerAgreement:
    """Numbers that are to be the same on all ranks of a pipeline, on their way."""

    def __init__(self, peers: PipelinePeers, numbers: dict[str, int], remedies: dict[str, str]) -> None:
        """Send `numbers` to the other ranks; this rank does not wait for them."""
        self._peers, self._numbers, self._remedies = peers, numbers, remedies
        self._mine = torch.tensor(list(numbers.values()), dtype=torch.int64, device=peers.here.device)
        self._everyones = [torch.empty_like(self._mine) for _ in range(peers.size)]
        with translated(peers.here, "agreeing on a step of the pipeline"):
            self._work = dist.all_gather(self._everyones, self._mine, group=peers.group, async_op=True)

    def check(self) -> None:
        """Wait for all ranks; raise `Mismatch`, on every rank, naming the first number that differs."""
        if self._work is None:
            return
        with translated(self._peers.here, "agreeing on a step of the pipeline"):
            self._work.wait()
        self._work = None
        for position, name in enumerate(self._numbers):
            values = [int(each[position]) for each in self._everyones]
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                raise Mismatch(
                    f"{name}: those of the ranks 0 and {other} of the pipeline differ",
                    rank=self._peers.here.job_rank,
                    operation="step of the pipeline",
                    remedy=self._remedies[name],
                )

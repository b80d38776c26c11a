"""What ranks of a pipeline send each other during a step, in the order that the schedule fixes.

[Note: one order a direction] Between two ranks, messages arrive in the order in which they were sent. Both know
the schedule: the receiver posts its receives in the sender's order, a few ahead, and takes out what an action
needs. So no transport needs tags, and two stages of one rank can send to the same neighbour.

[Note: a line a direction] NCCL does what a group is told in order, also sends and receives: a receive that was
posted ahead holds up a send to another rank, and two neighbours that send first wait for each other for ever. So
on accelerators each rank has a group of two for what it sends to a neighbour, and nothing else goes there. The
first send or receive of a group waits on the host until its other side has come: both make it when lines are made,
all ranks in one order of lines.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...comm.device.accelerator import is_accelerator
from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from ...core.env import expect_single_sends
from ...core.schedule_simulation import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.events import InnerExchange

# The ranks of one pipeline, and small values that they tell each other.

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


AHEAD = 2
"""Messages of one rank whose receives are posted before they are needed."""


class StageMessage(NamedTuple):
    """Tensors for one stage: of a micro-batch's forward pass, or gradients of its outputs."""

    stage: int
    """That receives it."""
    is_forward: bool
    micro_batch: int


def message_of(action: Action, schedule: Schedule) -> tuple[StageMessage, int] | None:
    """Return what `action` sends, and the rank that gets it; None if nothing."""
    if action.kind == FORWARD:
        if action.stage + 1 == schedule.stages:
            return None
        message = StageMessage(action.stage + 1, True, action.micro_batch)
    elif action.kind == BACKWARD_WEIGHT or action.stage == 0:
        return None
    else:
        message = StageMessage(action.stage - 1, False, action.micro_batch)
    return message, schedule.stage_ranks[message.stage]


class StageMailbox:
    """The messages of one step, on one rank."""

    def __init__(
        self,
        peers: PipelinePeers,
        schedule: Schedule,
        *,
        forward_only: bool,
        buffers: Callable[[StageMessage], list[torch.Tensor]],
    ) -> None:
        """`buffers`: makes memory for a message."""
        self._here, self._peers, self._rank, self._schedule = peers.here, peers, peers.index, schedule
        self._buffers = buffers
        self._kept: dict[StageMessage, list[torch.Tensor]] = {}
        """From stages of this rank, and received before they were needed."""
        self._sends: dict[int, deque[tuple[int, Any, torch.Tensor, StageMessage]]] = {}
        """By receiver: what may still be on its way, and the position of the action there that takes it."""
        self._positions = [{action: at for at, action in enumerate(each)} for each in schedule.actions]
        self._coming: dict[int, deque[StageMessage]] = {}
        self._posted: dict[int, deque[tuple[StageMessage, list[torch.Tensor], list[Any]]]] = {}
        self._expect(schedule.actions, forward_only=forward_only)

    def send(self, message: StageMessage, tensors: list[torch.Tensor]) -> None:
        """Send `tensors` to the rank of the stage; returns at once."""
        receiver = self._schedule.stage_ranks[message.stage]
        if receiver == self._rank:
            self._kept[message] = tensors
            return
        group, _, number = self._peers.line(self._rank, receiver)
        now = time.monotonic()
        sent = InnerExchange("pipeline", now, now, sum(tensor.nbytes for tensor in tensors))  # what waits receives
        self._here.session.recorder.record(sent)
        with translated(self._here, _describe(message)):
            for tensor in tensors:
                work = dist.isend(tensor, group=group, group_dst=number)
                at = self._position(receiver, self._taker(message))
                self._sends.setdefault(receiver, deque()).append((at, work, tensor, message))

    def receive(self, message: StageMessage) -> list[torch.Tensor]:
        """Return the tensors of `message`; waits for them."""
        sender = self._sender(message)
        while message not in self._kept:
            self._post(sender, AHEAD)
            arrived, tensors, works = self._posted[sender].popleft()
            with translated(self._here, _describe(arrived)):
                for work in works:
                    work.wait()
            self._kept[arrived] = tensors
            self._forget_sent(sender, self._position(sender, self._maker(arrived)))
        if sender in self._coming:
            self._post(sender, AHEAD)
        return self._kept.pop(message)

    def post(self) -> None:
        """Post the first receives."""
        for sender in self._coming:
            self._post(sender, AHEAD)

    def close(self) -> None:
        """Wait until everything is sent."""
        for receiver in self._sends:
            self._forget_sent(receiver, None)

    def _expect(self, rows: Sequence[Sequence[Action]], *, forward_only: bool = False) -> None:
        """Receive what the actions `rows` of all ranks send here, too."""
        for other, actions in enumerate(rows):
            for action in actions if other != self._rank else ():
                found = message_of(action, self._schedule)
                if found is not None and found[1] == self._rank and (found[0].is_forward or not forward_only):
                    self._coming.setdefault(other, deque()).append(found[0])
                    self._posted.setdefault(other, deque())

    def _position(self, rank: int, action: Action) -> int:
        """Return a number that grows in the order of a rank's actions."""
        return self._positions[rank][action]

    def _forget_sent(self, receiver: int, before: int | None) -> None:
        """Forget what `receiver` took before its action at `before`; None: wait until it has taken all."""
        sends = self._sends.get(receiver)
        while sends and (before is None or sends[0][0] < before):
            _, work, _, message = sends.popleft()
            with translated(self._here, _describe(message)):
                work.wait()

    def _taker(self, message: StageMessage) -> Action:
        if message.is_forward:
            return Action(message.stage, FORWARD, message.micro_batch)
        kind = BACKWARD_INPUT if self._schedule.divides_backward else BACKWARD
        return Action(message.stage, kind, message.micro_batch)

    def _maker(self, message: StageMessage) -> Action:
        other = message.stage + (-1 if message.is_forward else 1)
        return self._taker(message._replace(stage=other))

    def _sender(self, message: StageMessage) -> int:
        return self._schedule.stage_ranks[message.stage + (-1 if message.is_forward else 1)]

    def _post(self, sender: int, ahead: int) -> None:
        posted, coming = self._posted[sender], self._coming[sender]
        group, number, _ = self._peers.line(sender, self._rank)
        while coming and len(posted) < ahead:
            message = coming.popleft()
            tensors = self._buffers(message)
            with translated(self._here, _describe(message)):
                works = [dist.irecv(tensor, group=group, group_src=number) for tensor in tensors]
            posted.append((message, tensors, works))


def _describe(message: StageMessage) -> str:
    what = "activations for" if message.is_forward else "gradients of the outputs of"
    return f"{what} pipeline stage {message.stage}, micro-batch {message.micro_batch}"

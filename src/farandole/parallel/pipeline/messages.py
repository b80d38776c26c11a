"""What ranks of a pipeline send each other during a step, in the order that the schedule fixes.

[Note: one order a direction] Between two ranks, messages arrive in the order in which they were sent. Both know
the schedule: the receiver posts its receives in the sender's order, a few ahead, and takes out what an action
needs. So no transport needs tags, and two stages of one rank can send to the same neighbour.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...comm.world.comm_errors import translated
from ...core.schedule.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from ...core.vocabulary.events import InnerExchange
from .peers import PipelinePeers

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

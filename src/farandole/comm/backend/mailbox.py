"""Sends and receives between two ranks of a group: asynchronous, matched by rank, tag and order.

A thread of its own carries them, so that a receive which waits holds up no collective, and the other way round.

[Note: frames of a message] A message is two frames: what it is (type and number of elements), then its bytes.
Their tags are made of the user's tag and a count of the messages with that tag between these two ranks, which both
count alike: so frames never meet the wrong receive.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

import torch

from ...core.vocabulary.errors import CommError, Mismatch
from ..transport.rank_group import PieceExchange, RankGroup
from ..transport.transport import PendingMessage, Transport
from .exchange import SAME_CALLS
from .work import GroupWork

_FACTS_BYTES = 64
MOST_TAG = 2**24 - 1
_COUNTS = 2**38
_LOOK_SECONDS = 0.5
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(eq=False)
class _Letter:
    """A message on its way. `peer`: in the group; None: from any rank."""

    flat: torch.Tensor
    peer: int | None
    tag: int
    call: str
    is_sent: bool
    work: GroupWork
    into: torch.Tensor | None = None
    """Where it is to be written, if `flat` is no view of that."""
    facts: torch.Tensor = _NOTHING
    flights: tuple[PendingMessage, ...] = ()
    until_seconds: float = 0.0


class Mailbox:
    """Point-to-point operations of one group."""

    def __init__(self, transport: Transport, names: tuple[int, ...], timeout_seconds: float) -> None:
        """`transport` belongs to this mailbox from now on. `names`: the group's global ranks, for errors."""
        self._transport = transport
        self._names = names
        self._timeout_seconds = timeout_seconds
        self._circle = RankGroup(tuple(range(len(names))), transport.rank)
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._posted: deque[_Letter] = deque()
        self._changed = threading.Condition()
        self._under_way: list[_Letter] = []
        self._broken: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="farandole-mailbox", daemon=True)
        transport.belong_to(self._thread)
        self._thread.start()

    def post(
        self, flat: torch.Tensor, peer: int | None, tag: int, *, call: str, work: GroupWork,
        is_sent: bool, into: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Begin to send `flat` to `peer`, or to receive it; None: from any rank. `work` is told of the end."""
        letter = _Letter(flat, peer, tag, call, is_sent, work, into)
        with self._changed:
            if self._broken is None and not self._closing:
                self._posted.append(letter)
                self._changed.notify()
                self._transport.wake()
                return
        work.end(self._broken or self._closed(letter))

    def close(self) -> None:
        """End the thread and the connections; what is under way fails."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
            self._transport.wake()
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._transport.close()

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._posted or self._under_way or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
                posted = list(self._posted)
                self._posted.clear()
            self._under_way += posted
            try:
                if self._broken is not None:
                    raise self._broken
                with torch.no_grad():
                    self._carry(posted)
            except BaseException as problem:
                self._break(problem)
        for letter in [*self._under_way, *self._posted]:
            letter.work.end(self._closed(letter))

    def _carry(self, posted: list[_Letter]) -> None:
        for letter in posted:
            letter.until_seconds = time.monotonic() + self._timeout_seconds
            if letter.peer is not None:
                self._start(letter, letter.peer)
        self._advance()
        if self._under_way and not self._posted:
            self._transport.serve(_LOOK_SECONDS)
            self._advance()

    def _start(self, letter: _Letter, peer: int) -> None:
        letter.peer = peer
        key = (letter.is_sent, peer, letter.tag)
        tag = _frame_tag(letter.tag, self._counts[key])
        self._counts[key] += 1
        self._transport.peers.operation = letter.call
        facts = _facts_of(letter.flat)
        letter.facts = facts if letter.is_sent else torch.zeros_like(facts)
        data = letter.flat.view(torch.uint8)
        letter.flights = (self._one(peer, letter.facts, tag, letter.is_sent),)
        if data.numel():
            letter.flights += (self._one(peer, data, tag + 1, letter.is_sent),)

    def _one(self, peer: int, data: torch.Tensor, tag: int, is_sent: bool) -> PendingMessage:
        row = [_NOTHING] * len(self._names)
        row[peer] = data
        nothing = [_NOTHING] * len(self._names)
        parts = PieceExchange(row, nothing) if is_sent else PieceExchange(nothing, row)
        return self._transport.start_parts(parts, tag, self._circle)

    def _advance(self) -> None:
        """End what has arrived, give receives from any rank their rank, and raise for what is late or lost."""
        still: list[_Letter] = []
        for letter in self._under_way:
            if letter.peer is None:
                self._look_for_any(letter)
            if not self._has_arrived(letter):
                still.append(letter)
                continue
            if not letter.is_sent:
                self._check(letter)
                if letter.into is not None:
                    letter.into.copy_(letter.flat.view(letter.into.shape))
            letter.work.end(source=-1 if letter.peer is None else letter.peer)
        self._under_way = still
        now = time.monotonic()
        for letter in still:
            waited = set(range(len(self._names))) - {self._transport.rank}
            waited = waited if letter.peer is None else {letter.peer}
            self._transport.peers.operation = letter.call
            if letter.peer is not None or len(self._names) == 2:
                self._transport.refuse_lost(waited)
            if now > letter.until_seconds:
                raise self._transport.peers.stalled(waited, self._timeout_seconds)

    def _has_arrived(self, letter: _Letter) -> bool:
        if letter.peer is None or any(flight.waiting_for for flight in letter.flights):
            return False
        return not (letter.is_sent and self._transport.has_queued_for(letter.peer))

    def _look_for_any(self, letter: _Letter) -> None:
        for peer in range(len(self._names)):
            tag = _frame_tag(letter.tag, self._counts[False, peer, letter.tag])
            if peer != self._transport.rank and self._transport.has_early(peer, tag):
                self._start(letter, peer)
                return

    def _check(self, letter: _Letter) -> None:
        ours, theirs = (_text_of(facts) for facts in (_facts_of(letter.flat), letter.facts))
        if ours != theirs and letter.peer is not None:
            raise Mismatch(
                f"rank {self._names[letter.peer]} sent {theirs} where {ours} was expected",
                rank=self._names[self._transport.rank],
                operation=letter.call,
                remedy=SAME_CALLS,
            )

    def _break(self, problem: BaseException) -> None:
        with self._changed:
            first = self._broken is None
            self._broken = problem
            failed = [*self._under_way, *self._posted]
            self._under_way = []
            self._posted.clear()
        for letter in failed:
            letter.work.end(problem)
        if first:
            self._transport.leave(" ".join(f"{type(problem).__name__}: {problem}".split()))

    def _closed(self, letter: _Letter) -> CommError:
        return CommError("the group was closed", rank=self._names[self._transport.rank], operation=letter.call)


def _frame_tag(tag: int, number: int) -> int:
    """See [Note: frames of a message]."""
    return (tag * _COUNTS + number % _COUNTS) * 2


def _facts_of(flat: torch.Tensor) -> torch.Tensor:
    text = f"{flat.numel()} {str(flat.dtype).removeprefix('torch.')}".encode().ljust(_FACTS_BYTES, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text_of(facts: torch.Tensor) -> str:
    return bytes(facts.numpy()).rstrip(b"\0").decode(errors="replace")

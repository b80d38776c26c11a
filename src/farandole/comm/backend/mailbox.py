"""Sends and receives between two ranks of a group: asynchronous, matched by rank, tag and order.

They hold up no collective, and the other way round.

[Note: who carries messages] Who posts a message moves what can be moved at once, and who waits for one moves all
of them until that one is there. A thread of the mailbox goes on when no caller does, after a moment. One thread at
a time is the carrier: only it touches the connections.

[Note: frames of a message] A message is two frames: what it is (type and number of elements), then its bytes.
Their tags are made of the user's tag and a count of the messages with that tag between these two ranks, which both
count alike: so frames never meet the wrong receive.

[Note: order of receives] A message meets the first receive, in the order of posting, that would take it. A receive
from any rank takes the next message of its tag, of any sender. So a receive from a named rank that was posted
after it, with its tag, takes no number and expects no frame before that one has its sender.

[Note: early receives] The time of a message counts from the first wait for it: a receive may be posted hours
before what it is for, as control channels do. A rank that is lost is noticed without a wait.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from typing import NamedTuple

import torch

from ...core.vocabulary.errors import CommError, Mismatch
from ..transport.connect import HELLO, Callers, Connection, call_rank, open_door, tune
from ..transport.group_messages import FrameTransport
from ..transport.rank_group import PieceExchange, RankGroup
from ..transport.transport import PendingMessage
from ..world.world import World
from .calls import HESITATION_SECONDS, GroupWork, Servers
from .collectives import SAME_CALLS

_FACTS_BYTES = 64
MOST_TAG = 2**31 - 1
_COUNTS = 2**31
_LOOK_SECONDS = 0.5
_NOTHING = torch.empty(0, dtype=torch.uint8)
_log = logging.getLogger("farandole")


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
    seconds: float = 0.0
    """How long it may take."""
    until_seconds: float = float("inf")
    """See [Note: early receives]."""
    is_over: bool = False


class _Ending(NamedTuple):
    letter: _Letter
    problem: BaseException | None = None


class Mailbox:
    """Point-to-point operations of one group."""

    def __init__(self, connections: LateConnections, names: tuple[int, ...]) -> None:
        """`connections` belong to this mailbox from now on. `names`: the group's global ranks, for errors."""
        self._connections = connections
        self._transport = connections.transport
        self._names = names
        self._circle = RankGroup(tuple(range(len(names))), self._transport.rank)
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._posted: deque[_Letter] = deque()
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        """Told when the carrier stops, to those who wait for a message."""
        self._to_do = threading.Condition(self._lock)
        """Told to the thread."""
        self._is_carried = False
        self._under_way: list[_Letter] = []
        self._broken: BaseException | None = None
        self._closing = False
        self._servers = Servers("farandole-mailbox", self._serve)

    def post(
        self, flat: torch.Tensor, peer: int | None, tag: int, *, call: str, work: GroupWork,
        is_sent: bool, seconds: float, into: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Begin to send `flat` to `peer`, or to receive it; None: from any rank. `work` is told of the end.

        `seconds`: how long it may take, once it is waited for.
        """
        letter = _Letter(flat, peer, tag, call, is_sent, work, into, seconds=seconds)
        with self._lock:
            refused = self._broken or (self._closed(letter) if self._closing else None)
            is_carrier = refused is None and not self._is_carried
            if refused is None:
                work.finish, work.on_wait = partial(self._finish, letter), partial(self._begin_to_wait, letter)
                self._posted.append(letter)
                self._is_carried = True
                if not is_carrier:
                    self._transport.wake()
        if refused is not None:
            self._end(letter, refused)
        elif is_carrier:
            self._stop(self._carry(0.0))

    def close(self) -> None:
        """End the thread and the connections; what is under way fails."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._to_do.notify_all()
            self._transport.wake()
            is_free = self._free.wait_for(lambda: not self._is_carried, 2.0)
            left = [*self._under_way, *self._posted]
            self._under_way, self._is_carried = [], True
            self._posted.clear()
        for letter in left:
            self._end(letter, self._closed(letter))
        with self._lock:
            self._free.notify_all()
        self._servers.join(2.0)
        if is_free:
            self._transport.belong_to(threading.current_thread())
            self._connections.close()

    # -- carrying: see [Note: who carries messages] ---------------------------------------------------

    @staticmethod
    def _begin_to_wait(letter: _Letter) -> None:
        """See [Note: early receives]."""
        letter.until_seconds = min(letter.until_seconds, time.monotonic() + letter.seconds)

    def _finish(self, letter: _Letter) -> None:
        """Return when the message is over."""
        while True:
            with self._lock:
                while self._is_carried and not letter.is_over:
                    self._free.wait()
                if letter.is_over or self._closing:
                    return
                self._is_carried = True
            self._stop(self._carry(_LOOK_SECONDS))

    def _serve(self) -> None:
        while True:
            with self._lock:
                has_slept = False
                while (self._is_carried or not (self._posted or self._under_way)) and not self._closing:
                    has_slept = self._to_do.wait()
                if self._closing:
                    return
                self._is_carried = not has_slept
            if has_slept:
                time.sleep(HESITATION_SECONDS)
                continue
            self._stop(self._carry(_LOOK_SECONDS))

    def _stop(self, over: list[_Ending]) -> None:
        """Be the carrier no more; end what is over, and leave the rest to another thread."""
        with self._lock:
            self._is_carried = False
            for ending in over:
                ending.letter.is_over = True
            if (self._posted or self._under_way) and not self._closing:
                self._servers.start()
                self._to_do.notify()
            self._free.notify_all()
        for ending in over:
            self._end(*ending)

    def _carry(self, seconds: float) -> list[_Ending]:
        """Begin what was posted and move what can be, waiting for at most so long; return what is over."""
        over: list[_Ending] = []
        with self._lock:
            posted = list(self._posted)
            self._posted.clear()
        self._under_way += posted
        try:
            if self._broken is not None:
                raise self._broken
            self._transport.belong_to(threading.current_thread())
            with torch.inference_mode():
                for letter in posted:
                    if letter.is_sent and letter.peer is not None:
                        self._start(letter, letter.peer)
                    elif letter.peer is not None or len(self._names) == 2:
                        peer = 1 - self._transport.rank if letter.peer is None else letter.peer
                        self._transport.peers.operation = letter.call
                        self._connections.call(peer, letter.seconds, to_send=False)
                self._match_receives()
                self._transport.serve(0.0)
                self._advance(over)
                if seconds and self._under_way and not over:
                    self._transport.serve(seconds)
                    self._advance(over)
        except BaseException as problem:
            over += self._break(self._explained(problem))
        return over

    def _explained(self, problem: BaseException) -> BaseException:
        """Return the `Mismatch` that is behind an error of the transport, which knows lengths in bytes only."""
        for letter in self._under_way:
            if not letter.is_sent and letter.flights and not letter.flights[0].waiting_for:
                try:
                    self._check(letter)
                except Mismatch as mismatch:
                    return mismatch
        return problem

    def _match_receives(self) -> None:
        """Begin those that may be: see [Note: order of receives]."""
        held: set[int] = set()
        for letter in self._under_way:
            if letter.flights or letter.is_sent:
                continue
            peer = self._sender_for_any(letter) if letter.peer is None else letter.peer
            if peer is None:
                held.add(letter.tag)
            elif letter.tag not in held:
                self._start(letter, peer)

    def _start(self, letter: _Letter, peer: int) -> None:
        letter.peer = peer
        key = (letter.is_sent, peer, letter.tag)
        tag = _frame_tag(letter.tag, self._counts[key])
        self._counts[key] += 1
        self._transport.peers.operation = letter.call
        self._connections.call(peer, letter.seconds, to_send=letter.is_sent)
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

    def _advance(self, over: list[_Ending]) -> None:
        """Add what has arrived to `over`; raise for what is late or lost."""
        still: list[_Letter] = []
        self._match_receives()
        for letter in self._under_way:
            arrived = self._has_arrived(letter)
            if not letter.is_sent and (arrived or _brings_nothing(letter)):
                self._check(letter)
            if not arrived:
                still.append(letter)
                continue
            if not letter.is_sent and letter.into is not None:
                letter.into.copy_(letter.flat.view(letter.into.shape))
            letter.is_over = True
            over.append(_Ending(letter))
        self._under_way = still
        now = time.monotonic()
        for letter in still:
            waited = set(range(len(self._names))) - {self._transport.rank}
            waited = waited if letter.peer is None else {letter.peer}
            self._transport.peers.operation = letter.call
            if letter.is_sent and letter.peer is not None:
                self._transport.refuse_lost(waited)
            elif letter.peer is not None or len(self._names) == 2:
                self._connections.refuse_silent(waited)
            if now > letter.until_seconds:
                raise self._transport.peers.stalled(waited, letter.seconds)

    def _has_arrived(self, letter: _Letter) -> bool:
        if letter.peer is None or not letter.flights or any(flight.waiting_for for flight in letter.flights):
            return False
        if not letter.is_sent:
            return True
        return not (self._transport.has_queued_for(letter.peer) or self._connections.has_lost(letter.peer))

    def _sender_for_any(self, letter: _Letter) -> int | None:
        """Return who has sent what a receive from any rank waits for."""
        for peer in range(len(self._names)):
            tag = _frame_tag(letter.tag, self._counts[False, peer, letter.tag])
            if peer != self._transport.rank and self._transport.has_early(peer, tag):
                return peer
        return None

    def _check(self, letter: _Letter) -> None:
        ours, theirs = (_text_of(facts) for facts in (_facts_of(letter.flat), letter.facts))
        if ours != theirs and letter.peer is not None:
            raise Mismatch(
                f"rank {self._names[letter.peer]} sent {theirs} where {ours} was expected",
                rank=self._names[self._transport.rank],
                operation=letter.call,
                remedy=SAME_CALLS,
            )

    def _break(self, problem: BaseException) -> list[_Ending]:
        """Fail from now on, and let the other ranks know; return what has failed."""
        with self._lock:
            first = self._broken is None
            self._broken = problem
            failed = [letter for letter in (*self._under_way, *self._posted) if not letter.is_over]
            self._under_way = []
            self._posted.clear()
        if first:
            self._connections.stop_listening()
            self._transport.leave(" ".join(f"{type(problem).__name__}: {problem}".split()))
        return [_Ending(letter, problem) for letter in failed]

    def _end(self, letter: _Letter, problem: BaseException | None = None) -> None:
        letter.is_over = True
        callbacks = letter.work.end.tell(problem, source=-1 if letter.peer is None else letter.peer)
        if callbacks is not None:
            try:
                self._servers.call_back(callbacks)
            except BaseException:
                _log.exception("farandole: a callback at the end of a message failed")

    def _closed(self, letter: _Letter) -> CommError:
        return CommError("the group was closed", rank=self._names[self._transport.rank], operation=letter.call)


def _brings_nothing(letter: _Letter) -> bool:
    """Return whether the sender has said that no bytes follow: who expects some would wait for ever."""
    is_told = bool(letter.flights) and not letter.flights[0].waiting_for
    return is_told and _text_of(letter.facts).startswith("0 ")


def _frame_tag(tag: int, number: int) -> int:
    """See [Note: frames of a message]."""
    return (tag * _COUNTS + number % _COUNTS) * 2


def _facts_of(flat: torch.Tensor) -> torch.Tensor:
    text = f"{flat.numel()} {str(flat.dtype).removeprefix('torch.')}".encode().ljust(_FACTS_BYTES, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text_of(facts: torch.Tensor) -> str:
    return bytes(facts.numpy()).rstrip(b"\0").decode(errors="replace")


# Connections between ranks of a group that are made when the first message needs them.
#
# Each rank listens, and has said where in the store when the group was made. Who has something to send to a rank,
# or waits for it, calls it; what is sent travels by the sender's own call. So ranks need not agree on when.
#
# [Note: a rank that has left] A rank that waits for another one has called it, and notices by its own call when
# that one ends. What that one had sent before may still be on its way then: it travels by the other call, and is
# over when that one has ended too.


class LateConnections:
    """The connections of one group, and the transport that uses them. Made by all its ranks at once."""

    def __init__(self, world: World, names: tuple[int, ...]) -> None:
        """`names`: the group's global ranks, for errors."""
        self._world = world
        self._listener, self._door, self._everyone = open_door(world, "listening for messages", world.size)
        try:
            nobody: list[list[socket.socket]] = [[] for _ in range(world.size)]
            self.transport = FrameTransport(world, timeout_seconds=world.timeout_seconds, made=nobody, names=names)
        except BaseException:
            self._listener.close()
            raise
        self._callers = Callers(self._listener, HELLO.size)
        self.transport.watch(self._callers.fileno(), self._answer)
        self._is_deaf = False
        self._called: dict[int, Connection] = {}
        """By the rank that I have called."""
        self._refused: dict[int, str] = {}
        """Why there is no connection to a rank that was called."""
        self._calls_of: dict[int, Connection] = {}
        """By the rank that has called me."""

    def call(self, rank: int, seconds: float, *, to_send: bool) -> None:
        """Have a connection to `rank`. Without one, raises `PeerLost` when it is needed to send.

        Who wants to receive may find in what has come already what a rank sent before it left.
        """
        if rank in self._called or (rank in self._refused and not to_send):
            return
        try:
            deadline = time.monotonic() + seconds
            connection = call_rank(self._world, rank, self._everyone[rank], 0, deadline)
        except CommError as problem:
            self._refused[rank] = str(problem)
            if to_send:
                raise self.transport.peers.gone({rank: str(problem)}) from None
            return
        tune(connection)
        self._called[rank] = self.transport.add(rank, connection, sends=True)

    def has_lost(self, rank: int) -> bool:
        """Return whether nothing sent to `rank` arrives any more."""
        return rank in self._called and bool(self._called[rank].lost)

    def refuse_silent(self, ranks: set[int]) -> None:
        """Raise `PeerLost` when one of `ranks` is gone and all that it had sent is here.

        See [Note: a rank that has left].
        """
        if any(self.has_lost(rank) or rank in self._refused for rank in ranks):
            self._answer()
        lost = {}
        for rank in ranks:
            theirs = self._calls_of.get(rank)
            reason = self._called[rank].lost if rank in self._called else self._refused.get(rank, "")
            if theirs is not None and theirs.lost:
                lost[rank] = theirs.lost
            elif theirs is None and reason and not self._callers.has_pending:
                lost[rank] = reason
        if lost:
            raise self.transport.peers.gone(lost)

    def close(self) -> None:
        """Close all of it."""
        self.stop_listening()
        self.transport.close()

    def stop_listening(self) -> None:
        """Refuse ranks that have not called yet. May be called twice."""
        if not self._is_deaf:
            self._is_deaf = True
            self.transport.unwatch(self._callers.fileno())
            self._callers.close()
            self._listener.close()

    def _answer(self) -> None:
        if self._is_deaf:
            return
        for hello, connection, _ in self._callers.hear(0.0):
            told, rank, lane = HELLO.unpack(hello)
            is_new = rank < self._world.size and rank not in (self._world.rank, *self._calls_of)
            if not is_new or lane or not compare_digest(told, self._door.hello(rank, lane)):
                connection.close()
                continue
            tune(connection)
            self._calls_of[rank] = self.transport.add(rank, connection, sends=False)

"""Joins: which ranks have joined, in which order, and which was the last.

[Note: the place of a join] Rank 0 gives out the places, one after the other, and a rank tells the others that it
has joined only when it has its own. So a rank that acts after it saw another rank join has a later place; and the
last rank knows that it is the last before any rank goes on. The order in which the messages arrive
decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..channel import Frame
from ..operations import PendingTicket, Travel


class Send(Protocol):
    """Queues a frame; one for this rank itself goes nowhere."""

    def __call__(self, rank: int, kind: Frame, data: bytes = b"", number: int = 0) -> None:
        """See `ControllerState.send`."""


class PendingJoin:
    """A `request.JoinTicket`."""

    def __init__(self, epoch: int, before_wait: Callable[[], None]) -> None:
        self.epoch = epoch
        """See [Note: epochs of join] in `matcher`."""
        self.placed = PendingTicket(before_wait)
        self.everybody = PendingTicket(before_wait)

    def is_last(self) -> bool:
        """See `request.JoinTicket`."""
        found: bool = self.placed.wait()
        return found

    def done(self) -> bool:
        """See `request.Ticket`."""
        return self.everybody.done()

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """See `request.Ticket`."""
        self.everybody.call_when_done(callback)

    def travel(self) -> Travel:
        """See `request.Ticket`."""
        return self.everybody.travel()

    def wait(self) -> Any:
        """See `request.Ticket`."""
        return self.everybody.wait()

    def fail(self, error: Exception) -> None:
        """Fail this join."""
        self.placed.finish(None, error)
        self.everybody.finish(None, error)


class Joins:
    """One rank's view. Called with the engine's lock held."""

    def __init__(self, rank: int, epochs: Sequence[int], send: Send, joined: Callable[[int], None]) -> None:
        """`epochs`: the matcher's, by rank. `joined` is called when this rank has a place."""
        self._rank, self._epochs, self._size = rank, epochs, len(epochs)
        self._send, self._joined = send, joined
        self._placed = 0
        """On rank 0: how many have a place."""
        self.pending: PendingJoin | None = None

    def begin(self, before_wait: Callable[[], None]) -> PendingJoin:
        """This rank has no more data."""
        if self.pending is not None:
            return self.pending
        mine = self.pending = PendingJoin(self._epochs[self._rank], before_wait)
        if self._rank == 0:
            self.take_wish(0)
        else:
            self._send(0, Frame.JOIN_WISH)
        return mine

    def take_wish(self, rank: int) -> None:
        """On rank 0: `rank` has no more data, and gets the next place."""
        self._placed += 1
        is_last = self._placed == self._size
        if rank == self._rank:
            self.take_place(is_last=is_last)
        else:
            self._send(rank, Frame.JOIN_PLACE, number=int(is_last))
        if is_last:
            self._placed = 0
            for other in range(1, self._size):
                self._send(other, Frame.JOINED, number=rank)
            self.take_joined(rank)

    def take_place(self, *, is_last: bool) -> None:
        """This rank has its place: now the others may hear of it."""
        assert self.pending is not None, "who has no place asked for one"
        self.pending.placed.finish(is_last)
        for other in range(self._size):
            self._send(other, Frame.JOIN)
        self._joined(self._rank)

    def take_joined(self, last: int) -> None:
        """All have a place."""
        mine, self.pending = self.pending, None
        if mine is not None:
            mine.everybody.finish(last)

    def needs(self, rank: int) -> bool:
        """Return whether the join of this rank waits for that one: to join, or to give out places."""
        return self.pending is not None and (rank == 0 or self._epochs[rank] <= self.pending.epoch)

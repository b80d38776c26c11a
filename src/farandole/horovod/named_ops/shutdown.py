"""Shutdown: a failure here or elsewhere, a rank that leaves, `close`. Called with the lock held."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...core.vocabulary.errors import CommError, FarandoleError, PeerLost, Stalled
from ...core.vocabulary.text import name_ranks
from .channel import ControlChannel, Frame, PeerConnection
from .driver import ControllerState
from .launch_order import LaunchOrder
from .matcher import MatchSlot
from .operations import Operation, PendingTicket, Travel


class Shutdown:
    """Whether the engine is over, why, and what then becomes of its operations."""

    def __init__(self, state: ControllerState, joins: Joins, ordering: LaunchOrder) -> None:
        self._state, self._joins, self._ordering = state, joins, ordering
        self.error: FarandoleError | None = None
        """Why it is over."""

    def refuse_if_over(self) -> None:
        """Raise what ended the engine, if something did."""
        if self.error is not None:
            raise copy.copy(self.error)  # each who raises it has a traceback of its own

    def end(self, error: FarandoleError, *, tell: bool = False) -> None:
        """Fail all that is on its way, and all that will be submitted. `tell`: on the other ranks, too."""
        if self.error is not None:
            return
        self.error = error
        state = self._state
        if tell:
            text = f"{type(error).__name__}\n{error.message.partition(': ')[2]}\n{error.remedy}"
            for rank in range(state.size):
                state.send(rank, Frame.FAIL, text.encode())
            state.flush()
        for operation in list(state.in_flight.values()):
            state.finish(operation, None, copy.copy(error))
        state.in_flight.clear()
        if self._joins.pending is not None:
            self._joins.pending.fail(copy.copy(error))
        if state.plane is not None:
            state.plane.abort()

    def data_failed(self, problem: BaseException) -> None:
        """Moving data, or reading what others said, went wrong."""
        if isinstance(problem, CommError):
            self.end(problem, tell=not isinstance(problem, PeerLost))
        else:
            text = f"{type(problem).__name__}: {problem}"
            self.end(CommError(text, rank=self._state.rank, operation="moving data"), tell=True)

    def closed(self) -> None:
        """This rank has closed its engine."""
        closed = self._state.error("the engine was closed")
        if self._state.in_flight or self._joins.pending is not None:
            self.end(closed)
        self.error = self.error or closed

    # -- other ranks -----------------------------------------------------------------------------

    def take_failure(self, rank: int, data: bytes) -> None:
        """Another rank says that it is over."""
        name, text, remedy = data.decode().split("\n", 2)
        made = Stalled if name == "Stalled" else CommError
        where = f"{name_ranks([rank])} (on {self._state.hosts[rank]})"
        text = text if made is Stalled else f"{where} failed: {text}"
        self.end(self._state.error(text, remedy, kind=made))

    def take_leave(self, rank: int, first: int) -> None:
        """Another rank closes its engine. It saw the rank `first` go before; -1: none.

        What that one sent may arrive here later.
        """
        links = self._links
        earlier = links.by_rank[first] if 0 <= first < len(links.by_rank) else None
        if earlier is not None:
            links.note_gone(earlier)
        link = links.by_rank[rank]
        assert link is not None, "it came by this link"
        link.left = True
        links.note_gone(link)

    def take_end_of(self, link: PeerConnection) -> None:
        """The link of a rank was closed: hang up, and end when something waits for that rank."""
        state = self._state
        left = link.left
        self._links.hang_up(link)
        if self.error is not None:
            return
        waits = self._joins.needs(link.rank)
        for operation in list(state.in_flight.values()):
            waits = waits or link.rank in state.missing(operation)
        unreleased = self._ordering.waiting()
        waits = waits or any(link.rank in (0, *operation.present) for operation in unreleased)
        if waits or not left:
            self.end(self._departed(link))

    def refuse_departed(self, operation: Operation, slot: MatchSlot) -> None:
        """End when the operation waits for a rank that has gone."""
        self._end_if_gone(self._state.matcher.missing(operation, slot))

    def refuse_to_join_without(self) -> None:
        """End when a rank has gone that has not joined."""
        state = self._state
        self._end_if_gone([rank for rank in range(state.size) if rank != state.rank and self._joins.needs(rank)])

    def _end_if_gone(self, ranks: list[int]) -> None:
        for link in self._links.gone:  # the first one is the likeliest cause
            if link.rank in ranks:
                self.end(self._departed(link))
                return

    @property
    def _links(self) -> ControlChannel:
        assert self._state.links is not None, "there are other ranks"
        return self._state.links

    def _departed(self, link: PeerConnection) -> CommError:
        what = "has left: it closed its engine" if link.left else f"is gone: {link.closed}"
        text = f"{name_ranks([link.rank])} (on {self._state.hosts[link.rank]}) {what}"
        return self._state.error(text, "look for the first failure among the other ranks", kind=PeerLost)


# Joins: which ranks have joined, in which order, and which was the last.
#
# [Note: the place of a join] Rank 0 gives out the places, one after the other, and a rank tells the others that it
# has joined only when it has its own. So a rank that acts after it saw another rank join has a later place; and
# the last rank knows that it is the last before any rank goes on. The order in which the messages arrive decides
# nothing.


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

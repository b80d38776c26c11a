"""How it ends: by a failure here or elsewhere, by a rank that goes, by `close`. Called with the lock held."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from ....core.vocabulary.errors import CommError, FarandoleError, PeerLost, Stalled
from ....core.vocabulary.rank_lists import name_ranks
from ..channel.channel import ControlChannel, Frame, PeerConnection
from ..matching.matcher import MatchSlot
from ..operations.operation import Operation

if TYPE_CHECKING:
    from .controller import Controller


class Shutdown:
    """Whether the engine is over, why, and what then becomes of its operations."""

    def __init__(self, hub: Controller) -> None:
        self._hub = hub
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
        hub = self._hub
        if tell:
            text = f"{type(error).__name__}\n{error.message.partition(': ')[2]}\n{error.remedy}"
            for rank in range(hub.size):
                hub.send(rank, Frame.FAIL, text.encode())
            if hub.links is not None:
                hub.links.flush()
        for operation in list(hub.in_flight.values()):
            hub.finish(operation, None, copy.copy(error))
        hub.in_flight.clear()
        if hub.joins.pending is not None:
            hub.joins.pending.fail(copy.copy(error))
        if hub.plane is not None:
            hub.plane.abort()

    def data_failed(self, problem: BaseException) -> None:
        """Moving data, or reading what others said, went wrong."""
        if isinstance(problem, CommError):
            self.end(problem, tell=not isinstance(problem, PeerLost))
        else:
            text = f"{type(problem).__name__}: {problem}"
            self.end(CommError(text, rank=self._hub.rank, operation="moving data"), tell=True)

    def closed(self) -> None:
        """This rank has closed its engine."""
        closed = CommError("the engine was closed", rank=self._hub.rank, operation="negotiation")
        if self._hub.in_flight or self._hub.joins.pending is not None:
            self.end(closed)
        self.error = self.error or closed

    # -- other ranks -----------------------------------------------------------------------------

    def take_failure(self, rank: int, data: bytes) -> None:
        """Another rank says that it is over."""
        name, text, remedy = data.decode().split("\n", 2)
        made = Stalled if name == "Stalled" else CommError
        where = f"{name_ranks([rank])} (on {self._hub.hosts[rank]})"
        text = text if made is Stalled else f"{where} failed: {text}"
        self.end(made(text, rank=self._hub.rank, operation="negotiation", remedy=remedy))

    def take_leave(self, rank: int) -> None:
        """Another rank closes its engine."""
        links = self._links
        link = links.by_rank[rank]
        assert link is not None, "it came by this link"
        link.left = True
        links.note_gone(link)

    def take_end_of(self, link: PeerConnection) -> None:
        """The link of a rank was closed: hang up, and end when something waits for that rank."""
        hub = self._hub
        left = link.left
        self._links.hang_up(link)
        if self.error is not None:
            return
        waits = hub.joins.needs(link.rank)
        for operation in list(hub.in_flight.values()):
            slot = hub.matcher.slots.get(operation.signature.key)
            missing = [] if slot is None else hub.matcher.missing(operation, slot)
            waits = waits or link.rank in missing
        unreleased = hub.ordering.waiting()
        waits = waits or any(link.rank in (0, *operation.present) for operation in unreleased)
        if waits or not left:
            self.end(self._departed(link))

    def refuse_departed(self, operation: Operation, slot: MatchSlot) -> None:
        """End when the operation waits for a rank that has gone."""
        self._end_if_gone(self._hub.matcher.missing(operation, slot))

    def refuse_to_join_without(self) -> None:
        """End when a rank has gone that has not joined."""
        hub = self._hub
        self._end_if_gone([rank for rank in range(hub.size) if rank != hub.rank and hub.joins.needs(rank)])

    def _end_if_gone(self, ranks: list[int]) -> None:
        for link in self._links.gone:  # the first one is the likeliest cause
            if link.rank in ranks:
                self.end(self._departed(link))
                return

    @property
    def _links(self) -> ControlChannel:
        assert self._hub.links is not None, "there are other ranks"
        return self._hub.links

    def _departed(self, link: PeerConnection) -> PeerLost:
        what = "has left: it closed its engine" if link.left else f"is gone: {link.closed}"
        return PeerLost(
            f"{name_ranks([link.rank])} (on {self._hub.hosts[link.rank]}) {what}",
            rank=self._hub.rank,
            operation="negotiation",
            remedy="look for the first failure among the other ranks",
        )

"""What the other ranks say: each frame finds its place here. Called with the engine's lock held."""

from __future__ import annotations

import time
from collections.abc import Callable

from ....core.vocabulary.errors import CommError
from ..channel.channel import Frame
from ..matching.launch_order import LaunchOrder
from ..matching.matcher import Announcement, MatchSlot
from ..operations.signature import Signature
from .join import Joins
from .shutdown import Shutdown
from .stall_inspector import StallInspector
from .state import ControllerState

_DATA = int(Frame.DATA)
_ANNOUNCEMENTS = (_DATA, int(Frame.READY))
"""As plain numbers: most frames are these."""


class FrameDispatcher:
    """Takes the frames of all links."""

    def __init__(
        self, state: ControllerState, ordering: LaunchOrder, joins: Joins, stalls: StallInspector,
        ending: Shutdown, *, settle: Callable[[MatchSlot], None], joined: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`settle` finishes what is complete under a name; `joined` notes that a rank has joined."""
        self._state, self._ordering, self._joins = state, ordering, joins
        self._stalls, self._ending = stalls, ending
        self._settle, self._joined = settle, joined
        self._tables: list[dict[int, tuple[Signature, MatchSlot]]] = [{} for _ in range(state.size)]
        """What the numbers of each rank stand for."""

    def take(self, rank: int, kind: int, number: int, data: memoryview) -> None:
        """Take one frame."""
        state = self._state
        if kind in _ANNOUNCEMENTS:
            signature, slot = self._tables[rank][number]
            payload = bytearray(data) if kind == _DATA else None
            matcher = state.matcher
            matcher.add(slot, rank, Announcement(signature, matcher.epochs[rank], payload))
            if state.log.is_on and signature.key in state.in_flight:
                state.log.rank_ready(signature.name, rank, time.monotonic())
            if state.rank in slot.queues:
                self._settle(slot)
        elif kind == Frame.DEFINE:
            self._define(rank, number, Signature.decode(bytes(data)))
        elif Frame.JOIN <= kind <= Frame.JOIN_PLACE:
            self._take_join(rank, kind, number)
        else:
            self._take_rare(rank, kind, bytes(data))

    def _define(self, rank: int, number: int, signature: Signature) -> None:
        slot = self._state.matcher.slot(signature.key)
        slot.users += 1
        old = self._tables[rank].get(number)
        self._tables[rank][number] = (signature, slot)
        if old is not None:
            old[1].users -= 1
            self._state.matcher.release(old[1])

    def _take_join(self, rank: int, kind: int, number: int) -> None:
        if kind == Frame.JOIN:
            self._joined(rank)
        elif kind == Frame.JOIN_WISH:
            self._joins.take_wish(rank)
        elif kind == Frame.JOIN_PLACE:
            self._joins.take_place(is_last=bool(number))
        else:
            self._joins.take_joined(number)

    def _take_rare(self, rank: int, kind: int, data: bytes) -> None:
        if kind == Frame.UNIT:
            self._ordering.take_unit(data)
        elif kind == Frame.RELEASE:
            self._ordering.take_release(data)
        elif kind == Frame.DONE:
            self._ordering.take_done(data)
        elif kind in (Frame.OVERDUE, Frame.WHERE, Frame.HERE):
            self._stalls.take(rank, kind, data)
        elif kind == Frame.FAIL:
            self._ending.take_failure(rank, data)
        elif kind == Frame.LEAVE:
            self._ending.take_leave(rank)
        else:
            raise CommError(
                f"rank {rank} sent a frame of type {kind}", rank=self._state.rank, operation="negotiation"
            )

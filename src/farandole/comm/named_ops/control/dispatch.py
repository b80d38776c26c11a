"""What the other ranks say: each frame finds its place here. Called with the engine's lock held."""

from __future__ import annotations

import time
from collections.abc import Callable

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
        self._state, self._settle = state, settle
        self._tables: list[dict[int, tuple[Signature, MatchSlot]]] = [{} for _ in range(state.size)]
        """What the numbers of each rank stand for."""
        self._rare: dict[int, Callable[[int, int, bytes], None]] = {
            Frame.JOIN: lambda rank, number, data: joined(rank),
            Frame.JOIN_WISH: lambda rank, number, data: joins.take_wish(rank),
            Frame.JOIN_PLACE: lambda rank, number, data: joins.take_place(is_last=bool(number)),
            Frame.JOINED: lambda rank, number, data: joins.take_joined(number),
            Frame.UNIT: lambda rank, number, data: ordering.take_unit(data),
            Frame.RELEASE: lambda rank, number, data: ordering.take_release(data),
            Frame.DONE: lambda rank, number, data: ordering.take_done(data),
            Frame.OVERDUE: lambda rank, number, data: stalls.take(rank, Frame.OVERDUE, data),
            Frame.WHERE: lambda rank, number, data: stalls.take(rank, Frame.WHERE, data),
            Frame.HERE: lambda rank, number, data: stalls.take(rank, Frame.HERE, data),
            Frame.FAIL: lambda rank, number, data: ending.take_failure(rank, data),
            Frame.LEAVE: lambda rank, number, data: ending.take_leave(rank, number - 1),
        }

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
        elif kind in self._rare:
            self._rare[kind](rank, number, bytes(data))
        else:
            raise state.error(f"rank {rank} sent a frame of type {kind}")

    def _define(self, rank: int, number: int, signature: Signature) -> None:
        slot = self._state.matcher.slot(signature.key)
        slot.users += 1
        old = self._tables[rank].get(number)
        self._tables[rank][number] = (signature, slot)
        if old is not None:
            old[1].users -= 1
            self._state.matcher.release(old[1])

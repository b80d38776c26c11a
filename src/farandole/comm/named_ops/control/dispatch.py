"""What the other ranks say: each frame finds its place here. Called with the engine's lock held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ....core.vocabulary.errors import CommError
from ..channel.channel import Frame
from ..matching.matcher import Announcement, MatchSlot
from ..operations.signature import Signature

if TYPE_CHECKING:
    from .controller import Controller

_DATA = int(Frame.DATA)
_ANNOUNCEMENTS = (_DATA, int(Frame.READY))
"""As plain numbers: most frames are these."""


class FrameDispatcher:
    """Takes the frames of all links."""

    def __init__(self, hub: Controller) -> None:
        self._hub = hub
        self._tables: list[dict[int, tuple[Signature, MatchSlot]]] = [{} for _ in range(hub.size)]
        """What the numbers of each rank stand for."""

    def take(self, rank: int, kind: int, number: int, data: memoryview) -> None:
        """Take one frame."""
        hub = self._hub
        if kind in _ANNOUNCEMENTS:
            signature, slot = self._tables[rank][number]
            payload = bytearray(data) if kind == _DATA else None
            matcher = hub.matcher
            matcher.add(slot, rank, Announcement(signature, matcher.epochs[rank], payload))
            if hub.log.is_on and signature.key in hub.in_flight:
                hub.log.rank_ready(signature.name, rank, time.monotonic())
            if hub.rank in slot.queues:
                hub.settle(slot)
        elif kind == Frame.DEFINE:
            self._define(rank, number, Signature.decode(bytes(data)))
        elif Frame.JOIN <= kind <= Frame.JOIN_PLACE:
            self._take_join(rank, kind, number)
        else:
            self._take_rare(rank, kind, bytes(data))

    def _define(self, rank: int, number: int, signature: Signature) -> None:
        slot = self._hub.matcher.slot(signature.key)
        slot.users += 1
        old = self._tables[rank].get(number)
        self._tables[rank][number] = (signature, slot)
        if old is not None:
            old[1].users -= 1
            self._hub.matcher.release(old[1])

    def _take_join(self, rank: int, kind: int, number: int) -> None:
        hub = self._hub
        if kind == Frame.JOIN:
            hub.joined(rank)
        elif kind == Frame.JOIN_WISH:
            hub.joins.take_wish(rank)
        elif kind == Frame.JOIN_PLACE:
            hub.joins.take_place(is_last=bool(number))
        else:
            hub.joins.take_joined(number)

    def _take_rare(self, rank: int, kind: int, data: bytes) -> None:
        hub = self._hub
        if kind == Frame.UNIT:
            hub.ordering.take_unit(data)
        elif kind == Frame.RELEASE:
            hub.ordering.take_release(data)
        elif kind == Frame.DONE:
            hub.ordering.take_done(data)
        elif kind in (Frame.OVERDUE, Frame.WHERE, Frame.HERE):
            hub.stalls.take(rank, kind, data)
        elif kind == Frame.FAIL:
            hub.ending.take_failure(rank, data)
        elif kind == Frame.LEAVE:
            hub.ending.take_leave(rank)
        else:
            raise CommError(f"rank {rank} sent a frame of type {kind}", rank=hub.rank, operation="negotiation")

"""What the parts of one rank's controller share: its operations in flight, and the ways to the other ranks."""

from __future__ import annotations

import threading
import time
from typing import Any

from ....core.vocabulary.errors import CommError
from ...world.world import World
from ..channel import ControlChannel, Frame
from ..data.data_plane import DataPlane
from ..matching.matcher import Matcher
from ..operations import Operation, OperationLog


class ControllerState:
    """Owned by the controller. Everything is called with `lock` held."""

    def __init__(self, world: World, log: OperationLog) -> None:
        self.lock = threading.RLock()
        self.rank, self.size = world.rank, world.size
        self.hosts = [world.host]
        """The host of each rank."""
        self.log = log
        self.matcher = Matcher(world.rank, world.size)
        self.in_flight: dict[tuple[int, str], Operation] = {}
        self.links: ControlChannel | None = None
        """The control connections; None in a world of one."""
        self.plane: DataPlane | None = None
        """What moves large tensors; None in a world of one."""

    def refuse_reentry(self) -> None:
        """Raise `CommError` in a signal handler that has interrupted its own thread while it holds the lock.

        A frame is half written or half read then, and what the handler waits for may be just that frame.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks
            raise self.error(
                "a signal handler used named operations while its thread was sending or reading messages of them",
                remedy="set a flag in the handler, and call between two steps of the loop",
            )

    def send(self, rank: int, kind: Frame, data: bytes = b"", number: int = 0) -> None:
        """Queue a frame; it leaves at the next `flush`, or when the control thread wakes up."""
        if self.links is not None and rank != self.rank:
            self.links.send(rank, kind, number, data)

    def flush(self) -> None:
        """Send what is queued."""
        if self.links is not None:
            self.links.flush()

    def error(self, text: str, remedy: str = "", *, kind: type[CommError] = CommError) -> CommError:
        """Return an error of this rank's negotiation."""
        return kind(text, rank=self.rank, operation="negotiation", remedy=remedy)

    def missing(self, operation: Operation) -> list[int]:
        """Return the members that have not announced the operation."""
        slot = self.matcher.slots.get(operation.signature.key)
        return [] if slot is None else self.matcher.missing(operation, slot)

    def finish(self, operation: Operation, value: Any, error: Exception | None = None) -> None:
        """Give the operation its result, or its error; what comes second is ignored."""
        if operation.ticket.is_done:
            return
        self.in_flight.pop(operation.known.key, None)
        operation.payloads = []
        if self.log.is_on:
            signature = operation.signature
            text = "" if error is None else str(error)
            self.log.finished(signature.name, signature.dtype, signature.shape, time.monotonic(), text)
        operation.ticket.finish(value, error)

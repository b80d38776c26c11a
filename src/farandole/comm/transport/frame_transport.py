"""A transport beyond collectives: frames whose length the receiver does not know, and connections made later."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Collection

from .connection import Connection
from .transport import Transport


class FrameTransport(Transport):
    """See `transport.Transport`."""

    def add(self, rank: int, connection: socket.socket, *, sends: bool) -> Connection:
        """Take a connection to `rank` that was made later; return it. `sends`: what is sent there goes by it."""
        self._require_owner()
        lane = Connection(rank, connection)
        self._lanes[connection.fileno()] = lane
        self._poll.register(connection.fileno(), select.EPOLLIN)
        if sends:
            self._by_rank[rank].append(lane)
        return lane

    def watch(self, descriptor: int, serve: Callable[[], object]) -> None:
        """Call `serve`, from whatever call waits for the kernel, when the descriptor is readable."""
        self._watched[descriptor] = serve
        self._poll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """End what `watch` began."""
        self._watched.pop(descriptor)
        self._poll.unregister(descriptor)

    def send_frame(self, target: int, tag: int, frame: memoryview) -> None:
        """Begin to send a frame, whose length only this rank knows, to a rank that calls `take_frames`."""
        self._require_owner()
        self._send(target, tag, frame)

    def take_frames(self, sources: Collection[int], tag: int) -> dict[int, memoryview]:
        """Return the frames of `sources` with this tag, of any length, once they have arrived.

        Raises as `PendingMessage.wait` does.
        """
        self._require_owner()
        self._serve_until_none(lambda: {source for source in sources if (source, tag) not in self._early})
        return {source: self._early.pop((source, tag)) for source in sources}

"""What exchanges of gradients on a device need beside their buckets: streams of a pass, and steps compared late.

See [Note: no wait for a device] in `device.streams`.
"""

from __future__ import annotations

from typing import Any

from ..buckets.bucket import LateSteps
from ..device.streams import Streams


class DeviceExchanges:
    """One reducer's."""

    def __init__(self) -> None:
        self._streams: Streams | None = None
        self._seen: list[Any] = []
        """Streams that hooks of this pass have run on."""
        self._late: tuple[LateSteps, list[int], int] | None = None
        """What the ranks said in the last exchange; this rank's steps, passes and epoch in it; its number."""

    def begin(self, streams: Streams) -> None:
        """Begin an exchange whose codecs run on `streams`."""
        self._streams, self._seen = streams, []

    def note_stream(self) -> None:
        """Note the stream that a hook runs on: gradients that are ready there are waited for."""
        if self._streams is not None and (current := self._streams.current) not in self._seen:
            self._seen.append(current)

    def join_streams(self) -> None:
        """Let this stream wait for the others that gradients were made on."""
        if self._streams is None:
            return
        current = self._streams.current
        for stream in self._seen:
            if stream != current:
                with self._streams.on(stream):
                    ready = self._streams.record()
                self._streams.wait(ready)

    def keep(self, late: LateSteps, own: list[int], exchange: int) -> None:
        """Keep what says whether an exchange was of different steps until it is asked for."""
        self._late = (late, own, exchange)

    def different_steps(self) -> tuple[list[int], int] | None:
        """Return this rank's figures and the number of the exchange that is kept, if it was of different steps."""
        late, self._late = self._late, None
        return None if late is None or not late[0].differ else late[1:]

    def is_known_to_differ(self) -> bool:
        """Return whether the last exchange was of different steps; False where that is not known yet."""
        return self._late is not None and self._late[0].has_arrived and self._late[0].differ

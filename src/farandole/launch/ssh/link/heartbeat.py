"""The launcher's signs of life to all hosts, from a thread of its own."""

from __future__ import annotations

import threading
import time

from ...supervise.failure_detector import OwnPauses
from .frames import BEAT
from .host_link import HostLink
from .protocol import BEAT_SECONDS


class Heartbeat:
    """Sends a beat over each of `links` that is open.

    The main thread may be blocked by a console that is not read. This thread holds nothing that a forked
    process would need: hosts may be connected to while it runs.
    """

    def __init__(self) -> None:
        self.links: list[HostLink] = []
        """May grow and shrink at any time."""
        self.pauses = OwnPauses(time.monotonic())
        """When this process stood still as a whole."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="farandole-beats", daemon=True)

    def start(self) -> None:
        """Begin."""
        self.pauses.look(time.monotonic())
        self._thread.start()

    def stop(self) -> None:
        """End, if it has begun."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self.pauses.look(time.monotonic())
            for link in tuple(self.links):
                if link.is_open and link.channel.waiting_bytes == 0:
                    link.channel.send(BEAT)

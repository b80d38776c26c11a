"""Operations on a device that another thread tells it, in order with those of the thread that trains."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .accelerator import set_device
from .streams import Streams, streams_of

_PAUSE_SECONDS = 1e-3


@dataclass(frozen=True)
class OtherThread:
    """Made by the thread that trains, when what the other one shall use was told to the device."""

    device: torch.device
    streams: Streams
    ready: Any
    """Event behind it."""

    @classmethod
    def of(cls, device: torch.device) -> OtherThread | None:
        """Return one; None where operations are over when they return, as on the CPU."""
        streams = streams_of(device)
        return None if streams is None else cls(device, streams, streams.record())

    def begin(self) -> None:
        """In the other thread: let its operations follow `ready`."""
        set_device(self.device)
        self.streams.wait(self.ready)

    def end(self) -> None:
        """In the other thread: wait until the device has done them, so that any stream may use the results.

        The memory of what they used may be let go then, too. The thread that trains goes on meanwhile.
        """
        done = self.streams.record()
        while not self.streams.has_passed(done):
            time.sleep(_PAUSE_SECONDS)

    @staticmethod
    def take(results: Iterable[torch.Tensor]) -> None:
        """In the thread that trains: keep the memory of results, which the other one made, until it is done."""
        for each in results:
            streams = streams_of(each.device)
            if streams is not None:
                streams.keep(each)

"""The seam to accelerators: streams, events, and copies that the host does not wait for, by `torch.accelerator`.

[Note: no wait for a device] A device runs behind the host: what it is told now is done later. Who reads a number
from it, or copies to it from memory that is not pinned, waits until it has done all that it was told before. So
what is decided by numbers is decided on the device; what the host must know is copied beside the work that
follows, and read an exchange later, when it has arrived.

[Note: torch.compile] Dynamo would trace the code of a group in Python, and fails at its attributes. It is to break
the graph there, as it does at groups in C++. It would trace hooks too: of a backward pass or a step inside of a
compiled function, and they read clocks, count, and wait for other ranks. Its import takes seconds, so it is asked
only where something has imported it, as every optimizer does: nothing is traced before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar

import torch

from .accelerator import model_of, set_device, timing_event

# Operations on a device that another thread tells it, in order with those of the thread that trains.

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


# What torch.compile does not look into.

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Return the function as one that breaks a graph. See [Note: torch.compile]."""

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return _disabled(function)(*arguments, **named)
        return function(*arguments, **named)

    return called  # type: ignore[return-value]


def outside_graphs(call: Function) -> Function:
    """Return what a hook calls as what runs between two graphs. See [Note: torch.compile]."""
    return torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call


@cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason="it exchanges with other ranks")
    return disabled


class HostCopy:
    """A tensor on its way from a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # torch takes pinned memory for it
        self._arrived = torch.Event(tensor.device)
        self._arrived.record()

    @property
    def has_arrived(self) -> bool:
        """Whether it is there."""
        return self._arrived.query()

    def read(self) -> torch.Tensor:
        """Return it, in CPU memory, when it has arrived."""
        self._arrived.synchronize()
        return self._copy


class Streams:
    """The streams of one device. Streams and events are of types that only it knows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side = torch.Stream(device)
        """The stream that gradients travel on, beside the backward pass."""
        self.copies = torch.Stream(device)
        """The stream that batches are copied on, ahead of the step that uses them."""
        self.operations = torch.Stream(device)
        """The stream that named operations travel on, in an order that has nothing to do with gradients'."""

    @property
    def model(self) -> str:
        """What the device calls itself: equal on devices that compute the same bits."""
        return model_of(self._device)

    @property
    def current(self) -> torch.Stream:
        """The stream that this thread's operations go to."""
        return torch.accelerator.current_stream(self._device)

    @contextmanager
    def on(self, stream: torch.Stream) -> Generator[None, None, None]:
        """Let the operations of a block go to `stream`."""
        before = self.current
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def record(self) -> Any:
        """Return an event behind all that was told to the current stream."""
        event = torch.Event(self._device)
        event.record(self.current)
        return event

    def wait(self, event: Any) -> None:
        """Let the current stream wait for `event`; the host does not."""
        self.current.wait_event(event)

    def has_passed(self, event: Any) -> bool:
        """Return whether the device has done all that was told before `event`."""
        return bool(event.query())

    def mark(self) -> Any:
        """Return a mark behind all that was told to the current stream, which keeps when the device passed it."""
        mark = timing_event(self._device)
        mark.record(self.current)
        return mark

    def seconds_between(self, first: Any, last: Any) -> float:
        """Return the seconds from one mark to another; the host waits for the device to pass `last`."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor`, made on another stream, until the current one is done with it, too."""
        tensor.record_stream(self.current)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Begin to copy `tensor`, behind what was told to the current stream."""
        return HostCopy(tensor)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor`, which is in CPU memory, on the device; may be used on the current stream."""
        # The allocator of pinned memory keeps it until the copy is over.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return CPU memory that `to_device` copies from without another copy."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)


_streams: dict[torch.device, Streams] = {}


def has_streams(device: torch.device) -> bool:
    """Return whether a device runs behind the host; makes nothing of it."""
    return device in _streams or device.type not in ("cpu", "meta")


def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of a device; None where operations are over when they return, as on the CPU."""
    found = _streams.get(device)
    if found is None and has_streams(device):
        found = _streams[device] = Streams(device)
    return found


def simulate_device(device: torch.device, streams: Any) -> None:
    """Take `streams` for those of `device` from now on: an accelerator that is simulated; None ends that."""
    if streams is None:
        _streams.pop(device, None)
    else:
        _streams[device] = streams

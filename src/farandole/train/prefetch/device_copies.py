"""Copies of batches on an accelerator, made on a stream of their own while the step before computes.

The thread that draws pins a batch and tells the copies to their stream. The loop's stream waits for them where the
loop takes the batch; the host does not. Their memory is of the copies' stream, so it is kept until the loop's
stream is done with it, too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from ...comm.device.streams import Streams


class SentBatch(NamedTuple):
    """A batch whose tensors are on their way to the device."""

    batch: Any
    copies: dict[int, torch.Tensor]
    """On the device, by the identity of the tensor that was drawn."""
    arrived: Any
    """The event behind the last copy."""


class DeviceCopies:
    """Sends batches to one device."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams

    def send(self, batch: Any) -> SentBatch:
        """Begin to copy the tensors in dicts, lists and tuples; called by the thread that draws.

        Tensors that are on an accelerator already, and objects of other kinds, stay as they are.
        """
        copies: dict[int, torch.Tensor] = {}
        with self._streams.on(self._streams.copies):
            sent = self._send(batch, copies)
            return SentBatch(sent, copies, self._streams.record())

    def receive(self, sent: SentBatch) -> None:
        """Let the current stream use a batch from now on; called by the loop."""
        self._streams.wait(sent.arrived)
        for tensor in sent.copies.values():
            self._streams.keep(tensor)

    def _send(self, value: Any, copies: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies and value.device.type == "cpu":
                copies[id(value)] = self._copy(value)
            return copies.get(id(value), value)
        if isinstance(value, Mapping):
            return _rebuilt(value, {key: self._send(each, copies) for key, each in value.items()})
        if isinstance(value, PackedSequence):  # its batch sizes stay on the CPU
            packed: Any = value
            moved = packed.to(self._device, non_blocking=True)
            copies.update((id(old), new) for old, new in zip(packed, moved, strict=True) if new is not old)
            return moved
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._send(each, copies) for each in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._send(each, copies) for each in value)
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and not tensor.is_nested:
            return self._streams.to_device(tensor)
        return tensor.to(self._device)


def _rebuilt(old: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of `old` with other values."""
    if type(old) is dict:
        return values
    if isinstance(old, MutableMapping):
        made = copy.copy(old)
        made.update(values)
        return made
    kind: Any = type(old)
    return kind(values)

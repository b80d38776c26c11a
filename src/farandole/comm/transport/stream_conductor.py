"""What drives codecs on a device: on one side stream, by collectives of the backend, without a thread.

A codec is a generator that yields messages. On a device its operations are told and not waited for, so the hook
that completes a bucket drives it to its end at once, and the backward pass goes on.

[Note: two waits] The side stream waits for the stream that the gradients are on, before a bucket; the stream that
uses the means waits for the side stream, at the end of the backward pass. Everything else is ordered by these: the
memory of a bucket and what codecs keep are made once, and each stream uses them behind the other. Memory that is
let go was used on one stream, or is behind both waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...core.step_model.link import ring_sent_bytes
from ..collectives import all_reduce
from ..device.streams import Streams
from ..messages import Message
from .comm_thread import SegmentWork
from .group_messages import drive, exchange_by_group
from .rank_group import PieceExchange, RankGroup


@dataclass(eq=False)
class StreamWork:
    """A bucket whose exchange was told to the side stream."""

    streams: Streams
    sent_bytes: int = 0
    _done: Any = None

    def wait(self) -> None:
        """Let the current stream wait for it; the host does not."""
        self.streams.wait(self._done)


class StreamConductor:
    """Drives buckets on the side stream of one device, in the order of calls, which all ranks agree on."""

    def __init__(
        self,
        streams: Streams,
        group: dist.ProcessGroup | None,
        parts: Mapping[RankGroup, dist.ProcessGroup] | None = None,
    ) -> None:
        """`group`: of all ranks; None: messages go another way. `parts`: other groups that items may be of."""
        self.streams, self._group, self._parts = streams, group, parts or {}

    def submit(
        self,
        items: Sequence[SegmentWork],
        complete: Callable[[], None],
        prepare: Callable[[], object] | None = None,
    ) -> StreamWork:
        """Drive `prepare`, `items`, then `complete`, behind what the current stream was told.

        See [Note: two waits]. What is done before and behind the items is told by the thread that trains.
        """
        work = StreamWork(self.streams)
        with self._on_side(work):
            if prepare is not None:
                prepare()
            for item in items:
                item.finish(drive(item, partial(self._carry, work)))
            complete()
        return work

    def all_reduce(self, tensor: torch.Tensor) -> StreamWork:
        """Sum `tensor` over the ranks, in place, in its turn among what is submitted."""
        work = StreamWork(self.streams)
        with self._on_side(work):
            all_reduce(tensor, self._group_of(None))
        return work

    def close(self) -> None:
        """Let go what it holds."""

    def seconds_of(self, message: Message, circle: RankGroup) -> float:
        """Return the seconds of one exchange, called by all ranks between two steps; the host waits for it."""
        work = StreamWork(self.streams)
        with self._on_side(work):
            begin = self.streams.mark()
            exchange_by_group(message, circle.seat, self._group_of(circle))
            end = self.streams.mark()
        work.wait()  # the message may be let go
        return self.streams.seconds_between(begin, end)

    def _group_of(self, circle: RankGroup | None) -> dist.ProcessGroup:
        found = self._group if circle is None else self._parts.get(circle, self._group)
        assert found is not None, "who has none sends otherwise"
        return found

    @contextmanager
    def _on_side(self, work: StreamWork) -> Generator[None, None, None]:
        """Let a block go to the side stream, behind what the current one was told; `work` is done behind it."""
        ready = self.streams.record()
        with self.streams.on(self.streams.side), torch.no_grad():
            self.streams.wait(ready)
            yield
            work._done = self.streams.record()

    def _carry(self, work: StreamWork, message: Message | PieceExchange, circle: RankGroup) -> torch.Tensor:
        assert isinstance(message, Message), "on a device all ranks exchange, whole tensors"
        work.sent_bytes += _sent_bytes(message, circle.seat.size)
        return exchange_by_group(message, circle.seat, self._group_of(circle))


def _sent_bytes(message: Message, size: int) -> int:
    """Return the payload that this rank sends to others."""
    whole: int = message.tensor.nbytes
    return ring_sent_bytes(whole, size, passes=1) if message.operation == "all_to_all" else whole * (size - 1)

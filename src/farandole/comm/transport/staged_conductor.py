"""What drives codecs on a device where the backend carries no messages, or slower ones: through CPU memory.

Its thread conducts conversations on the side stream. A message is copied to pinned memory, sent by our connections
as those of tensors in CPU memory are, and what arrives is copied to the device. Only what codecs have packed is
copied. The thread waits for copies, the backward pass does not; its end waits for the thread, as on the CPU.

[Note: who tells the device] Collectives of the backend are told by the thread that trains alone, in the order of
the program: those inside a host before a bucket's conversations, when it is launched, and behind them, when it is
waited for. Told by two threads, those of two groups might meet in another order on another rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...core.link import ring_sent_bytes
from ...core.vocabulary.errors import Stalled
from ..collectives import all_reduce
from ..device.accelerator import set_device
from ..device.streams import Streams
from ..messages import Message, Reduction
from ..world.world import World
from .comm_thread import BucketWork, CommThread, Conversation, SegmentWork
from .group_messages import drive, exchange_by_group
from .rank_group import PieceExchange, RankGroup
from .transport import Transport

# What drives codecs on a device: on one side stream, by collectives of the backend, without a thread.
#
# A codec is a generator that yields messages. On a device its operations are told and not waited for, so the hook
# that completes a bucket drives it to its end at once, and the backward pass goes on.
#
# [Note: two waits] The side stream waits for the stream that the gradients are on, before a bucket; the stream
# that uses the means waits for the side stream, at the end of the backward pass. Everything else is ordered by
# these: the memory of a bucket and what codecs keep are made once, and each stream uses them behind the other.
# Memory that is let go was used on one stream, or is behind both waits.


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


_PAUSE_SECONDS = 20e-6
"""Between two looks at the device: less than a message takes."""


class StagedTransport(Transport):
    """A transport of tensors on a device, told to the current stream of its thread."""

    def __init__(self, world: World, *, streams: Streams, **options: Any) -> None:
        """`options`: see `Transport`."""
        super().__init__(world, **options)
        self._streams = streams

    def delivered(self, received: torch.Tensor) -> torch.Tensor:
        """See `Transport`."""
        return self._streams.to_device(received)

    def _to_send(self, tensor: torch.Tensor, circle: RankGroup) -> torch.Tensor:
        copy = self._streams.to_host(tensor)
        deadline, others = time.monotonic() + self.timeout_seconds, set(circle.ranks) - {self.rank}
        while not copy.has_arrived:  # other messages move on
            self.refuse_lost(others)
            moved = self.moved_bytes
            self.serve_now()
            if moved == self.moved_bytes:
                time.sleep(_PAUSE_SECONDS)
            if time.monotonic() > deadline:
                raise Stalled(
                    f"the device did not come to a message for {self.timeout_seconds:g} s",
                    rank=self.rank,
                    operation="exchange",
                    remedy="it waits for a collective of the script that another rank has not begun",
                )
        return copy.read()

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._streams.host_memory(shape, dtype)


class _SideThread(CommThread):
    """Tells all its jobs to the side stream of a device."""

    def __init__(self, transport: Transport, streams: Streams, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._events: dict[int, Any] = {}
        """By number of job: behind what its tensors were made by."""
        super().__init__(transport)

    def submit_behind(self, event: Any, items: Sequence[SegmentWork], number: int) -> BucketWork:
        """Queue a job whose items follow `event` on the device; see `submit`."""
        self._events[number] = event
        return self.submit([_behind(self._streams, event, item) for item in items], number=number)

    def _serve(self) -> None:
        try:
            set_device(self._device)
            with self._streams.on(self._streams.side):
                super()._serve()
        except BaseException as problem:
            self._break(problem)
            super()._serve()  # refuses all jobs

    def _conduct(self, job: BucketWork) -> None:
        super()._conduct(job)
        self._events.pop(job.number, None)

    def _runs_ahead(self, job: BucketWork) -> bool:
        """See `CommThread`: a job that the device has not come to would hold up those before it."""
        return super()._runs_ahead(job) and self._streams.has_passed(self._events[job.number])


@dataclass(eq=False)
class StagedWork(StreamWork):
    """A bucket whose exchange the thread was given."""

    job: BucketWork | None = None
    complete: Callable[[], None] | None = None
    """Told behind the exchange by who waits for it."""

    def wait(self) -> None:
        """Wait until the thread has told all of it to the device; raise what stopped it. See `StreamWork`."""
        job, complete, self.complete = self.job, self.complete, None
        assert job is not None, "the thread was given it"
        job.wait()
        self.sent_bytes = job.sent_bytes
        if complete is not None:
            with self.streams.on(self.streams.side), torch.no_grad():
                complete()
                self._done = self.streams.record()
        super().wait()


class StagedConductor(StreamConductor):
    """Drives buckets of one device through CPU memory, in the order of calls, which all ranks agree on."""

    def __init__(
        self,
        streams: Streams,
        transport: StagedTransport,
        *,
        device: torch.device,
        everyone: RankGroup,
        sums: dist.ProcessGroup | None,
    ) -> None:
        """`transport`: the thread's from now on. `everyone`: all ranks.

        `sums`: the backend's group of all ranks, by which buckets without a codec go; None: they go as others do.
        """
        super().__init__(streams, sums)
        self._everyone, self._sums_by_backend = everyone, sums is not None
        self._thread = _SideThread(transport, streams, device)
        self._submitted = 0

    def submit(
        self,
        items: Sequence[SegmentWork],
        complete: Callable[[], None],
        prepare: Callable[[], object] | None = None,
    ) -> StreamWork:
        """See `StreamConductor`, and [Note: who tells the device]."""
        ready = self.streams.record()
        if prepare is not None:
            with self.streams.on(self.streams.side), torch.no_grad():
                self.streams.wait(ready)
                prepare()
                ready = self.streams.record()
        job = self._thread.submit_behind(ready, items, self._submitted)
        self._submitted += 1
        return StagedWork(self.streams, job=job, complete=complete)

    def all_reduce(self, tensor: torch.Tensor) -> StreamWork:
        """See `StreamConductor`, and [Note: who tells the device]."""
        if self._sums_by_backend:
            return super().all_reduce(tensor)
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self.submit([SegmentWork(partial(_sum, real), partial(_copy, real), self._everyone)], _nothing)

    def seconds_of(self, message: Message, circle: RankGroup) -> float:
        """See `StreamConductor`."""
        begin = self.streams.mark()
        work = self.submit([SegmentWork(partial(_one, message), _nothing, circle)], _nothing)
        work.wait()
        return self.streams.seconds_between(begin, self.streams.mark())

    def close(self) -> None:
        """End the thread and close its connections."""
        self._thread.close()


def _behind(streams: Streams, ready: object, item: SegmentWork) -> SegmentWork:
    """Return `item` so that it begins behind an event. It lives as long as its bucket: it knows no connection."""

    def begin() -> Conversation:
        streams.wait(ready)
        return item.begin()

    return SegmentWork(begin, item.finish, item.circle)


def _sum(tensor: torch.Tensor) -> Reduction:
    return (yield Message(tensor, "all_reduce"))


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> None:
    tensor.copy_(source)


def _one(message: Message) -> Reduction:
    return (yield message)


def _nothing(*_: object) -> None:
    """Nothing is done with what was received, or behind it."""

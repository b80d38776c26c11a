"""Messages between ranks over our own TCP connections, driven by the thread that waits.

[Note: why not the backend's sends] With gloo's point-to-point sends a message is announced and answered
before it travels, and threads wake each other: 3.2 ms of CPU time a megabyte in pieces of 256 KB
beside 1.2 here, and 1.4 ms a piece when pieces are small (measured, docs/results/network.md). Here one thread
does all the work while it waits.

Every rank sends in its own order; a frame that arrives early is kept until it is waited for (at most a window of
them). No frame may exceed a limit that all ranks know: a length without sense is an error, not an allocation.

[Note: last words] A rank that fails and lives on keeps its connections, and the others would wait for it until
their time is over. So a rank whose transport failed sends a last frame with the reason, and nothing more.
Its sockets are shut down in that direction alone: closed with something unread in them, the kernel would throw
the last frame away.

[Note: one thread] Queues, frames half received and what is waited for have no locks: a second thread that serves
the connections loses bytes, and the stream is nonsense from there on. So a transport belongs to one thread, and
says so to any other. That of a `CommThread` belongs to its thread: others ask for `CommThread.run`.
Only `wake` and `abort` are for all.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...core.vocabulary.errors import CommError, Mismatch, PeerLost, Stalled
from ...core.vocabulary.text import name_ranks
from ..messages import (
    GroupRank,
    Message,
    Reduction,
    received_shape,
    reduce_scatter_all_gather,
    sources_and_targets,
)
from ..world.store_sync import all_gather_json
from ..world.world import World
from .connect import Connection, connect_all
from .rank_group import PieceExchange, RankGroup


# What is said of other ranks when an exchange with them goes wrong: which, and on which hosts.
@dataclass
class Peers:
    """The ranks of a world, seen from one of them."""

    rank: int
    hosts: Sequence[str]
    """By rank."""
    names: Sequence[int] | None = None
    """What each rank is called in errors, where that is another number: ranks of a part of a job."""
    operation: str = "exchange"
    """What errors say was going on."""

    def stalled(self, ranks: Collection[int], seconds: float) -> Stalled:
        """Return the error for ranks that are waited for and send nothing."""
        remedy = "it is stuck, or did not make this call"
        return Stalled(f"{self._name(ranks)} sent nothing for {seconds:g} s", **self._where(remedy))

    def gone(self, lost: Mapping[int, str]) -> PeerLost:
        """Return the error for ranks that are waited for, whose connections were lost; `lost` says why."""
        # Those who left because another one did are not the cause.
        first = next((rank for rank in sorted(lost) if PeerLost.__name__ not in lost[rank]), min(lost))
        remedy = "look for the first failure among the other ranks"
        return PeerLost(f"{self._name([first])} is gone: {lost[first]}", **self._where(remedy))

    def too_long(self, rank: int, length: int, limit: int) -> Mismatch:
        """Return the error for a frame that is longer than any may be."""
        remedy = "the connection is damaged, or that of another program; all ranks must run the same model"
        text = f"{self._name([rank])} announced {length} bytes, and no message has more than {limit}"
        return Mismatch(text, **self._where(remedy))

    def other_length(self, rank: int, theirs: int, ours: int) -> Mismatch:
        """Return the error for a frame that is not as long as the receive that was posted for it."""
        remedy = "a codec must yield messages of the same shape on all ranks"
        return Mismatch(
            f"{self._name([rank])} sent {theirs} bytes where {ours} were expected", **self._where(remedy)
        )

    def _where(self, remedy: str) -> dict[str, Any]:
        return {"rank": self._named([self.rank])[0], "operation": self.operation, "remedy": remedy}

    def _name(self, ranks: Collection[int]) -> str:
        hosts = sorted({self.hosts[rank] for rank in ranks})
        return f"{name_ranks(self._named(ranks))} (on {', '.join(hosts)})"

    def _named(self, ranks: Collection[int]) -> list[int]:
        return sorted(ranks if self.names is None else (self.names[rank] for rank in ranks))


MOST_LIMIT_BYTES = 2**40
"""Limit if it is unknown how long frames may be."""
LEAST_LIMIT_BYTES = 64 * 2**20
"""Every frame may be this long."""
_LIMIT_OVER_PARAMETERS = 4
_LAST_WORDS = 2**64 - 1
"""The tag of the last frame."""
_LAST_WORDS_BYTES = 4096
_LAST_SECONDS = 3.0
"""For ranks that take what was begun before."""


def limit_for(parameter_bytes: int) -> int:
    """Return how long a frame may be where the gradients have `parameter_bytes`: several times all of them."""
    return max(LEAST_LIMIT_BYTES, _LIMIT_OVER_PARAMETERS * parameter_bytes)


@dataclass(eq=False, slots=True)
class PendingMessage:
    """One message on its way."""

    transport: Transport
    received: torch.Tensor
    sent_bytes: int
    waiting_for: set[int]
    """Ranks whose part has not arrived."""
    kept: torch.Tensor
    """What is being sent must live until it is."""

    def wait(self) -> torch.Tensor:
        """Return what was received, once it has arrived; raise `PeerLost`, `Stalled` or `Mismatch`."""
        if self.waiting_for:
            self.transport.progress(self)
        return self.transport.delivered(self.received)


class Transport:
    """Sends messages among all ranks of a world. Used by one thread, see [Note: one thread]."""

    def __init__(
        self,
        world: World,
        *,
        timeout_seconds: float,
        lanes: int = 1,
        limit_bytes: int = MOST_LIMIT_BYTES,
        congestion_control: str = "",
        made: Sequence[Sequence[socket.socket]] | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        """Connect all ranks; to be called by all of them. `made`: connections that are there already, by rank.

        `limit_bytes`: how long a frame may be, the same on all ranks. `congestion_control`: see `connect_all`.
        `names`: what ranks are called in errors, where that is another number.
        """
        self.rank = world.rank
        self._limit_bytes = limit_bytes
        self.moved_bytes = 0
        """Bytes that the kernel took or gave so far, headers too."""
        hosts = [str(host) for host in all_gather_json(world, "host names", world.host)]
        self.peers = Peers(world.rank, hosts, names)
        self.timeout_seconds = timeout_seconds
        self.used_lanes = lanes
        """Connections to each rank that carry what is sent. Changed only while nothing is on its way."""
        self.sum_by: Callable[[torch.Tensor, GroupRank], Reduction] = reduce_scatter_all_gather
        """How a sum travels: changed by all ranks alike, and as seldom."""
        self._owner: threading.Thread | None = None
        self._poll = select.epoll()
        self._lanes: dict[int, Connection] = {}
        self._by_rank: list[list[Connection]] = []
        found = connect_all(world, lanes, timeout_seconds, congestion_control) if made is None else made
        for rank, connections in enumerate(found):
            self._by_rank.append([Connection(rank, connection) for connection in connections])
            for lane in self._by_rank[-1]:
                self._lanes[lane.socket.fileno()] = lane
                self._poll.register(lane.socket.fileno(), select.EPOLLIN)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._waker, select.EPOLLIN)
        self._watched: dict[int, Callable[[], object]] = {}
        self._posted: dict[tuple[int, int], tuple[memoryview, PendingMessage]] = {}
        self._early: dict[tuple[int, int], memoryview] = {}
        """Frames that arrived before their receive was posted."""

    def belong_to(self, thread: threading.Thread) -> None:
        """Let `thread` use it from now on, and no other. Before, it belongs to the first that uses it."""
        self._owner = thread

    def start(self, message: Message, tag: int, circle: RankGroup) -> PendingMessage:
        """Begin to send `message`, anything but a sum, among the ranks of `circle`.

        All of them give the same `tag`, which nothing else on its way has.
        """
        self._require_owner()
        seat = circle.seat
        tensor = self._to_send(message.tensor.contiguous(), circle)
        received = self._room(received_shape(message, seat), tensor.dtype)
        flight = PendingMessage(self, received, 0, set(), tensor)
        if tensor.numel() == 0:
            return flight
        rows = [_view(row) for row in received]
        self._refuse_long(message, seat, tensor)
        parts = list(tensor) if message.operation == "all_to_all" else [tensor] * seat.size
        sources, targets = sources_and_targets(message, seat)
        if len(rows) == seat.size or not sources:
            for row in received[seat.rank : seat.rank + 1]:
                row.copy_(parts[seat.rank])
        for source in sources:
            self._post(circle.ranks[source], tag, rows[source % len(rows)], flight)
        for target in targets:
            flight.sent_bytes += self._send(circle.ranks[target], tag, _view(parts[target]))
        return flight

    def start_parts(self, parts: PieceExchange, tag: int, circle: RankGroup) -> PendingMessage:
        """Begin to exchange `parts` among the ranks of `circle`; see `start`. Received: an empty tensor."""
        self._require_owner()
        seat = circle.seat
        nothing = torch.empty(0, dtype=torch.uint8)
        flight = PendingMessage(self, nothing, 0, set(), nothing)
        sources, targets = sources_and_targets(Message(nothing, "all_to_all"), seat)
        for source in sources:
            if parts.incoming[source].numel():
                self._post(circle.ranks[source], tag, _view(parts.incoming[source]), flight)
        for target in targets:
            if parts.outgoing[target].numel():
                flight.sent_bytes += self._send(circle.ranks[target], tag, _view(parts.outgoing[target]))
        return flight

    def delivered(self, received: torch.Tensor) -> torch.Tensor:
        """Return what has arrived as who sent the message wants it."""
        return received

    def _to_send(self, tensor: torch.Tensor, circle: RankGroup) -> torch.Tensor:
        """Return a tensor in CPU memory with the values of one that is contiguous, for the ranks of `circle`."""
        return tensor if tensor.is_cpu else tensor.cpu()

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return CPU memory to receive into."""
        return torch.empty(shape, dtype=dtype)

    def progress(self, flight: PendingMessage) -> None:
        """Send and receive whatever can be until `flight` has arrived."""
        self._require_owner()
        self._serve_until_none(lambda: flight.waiting_for)

    def _serve_until_none(self, missing: Callable[[], set[int]]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        while ranks := missing():
            self.refuse_lost(ranks)
            moved = self.moved_bytes
            self._serve(1.0)
            if moved == self.moved_bytes and time.monotonic() > deadline:
                raise self.peers.stalled(ranks, self.timeout_seconds)
            if moved != self.moved_bytes:
                deadline = time.monotonic() + self.timeout_seconds

    @property
    def has_more_to_send(self) -> bool:
        """Whether something is queued that the kernel has not taken yet."""
        return any(lane.has_more_to_send for lane in self._lanes.values())

    def drain(self, seconds: float) -> None:
        """Send what is queued, for at most `seconds`, or until `wake`. Quiet about ranks that are gone."""
        self._require_owner()
        deadline = time.monotonic() + seconds
        while self.has_more_to_send and (left := deadline - time.monotonic()) > 0:
            if self._serve(left):
                return

    def serve(self, seconds: float) -> None:
        """Send and receive what can be, and wait for something to do for at most `seconds`, or until `wake`."""
        self._require_owner()
        self._serve(seconds)

    def has_early(self, source: int, tag: int) -> bool:
        """Return whether a frame has arrived before its receive was posted."""
        return (source, tag) in self._early

    def has_queued_for(self, rank: int) -> bool:
        """Return whether something is queued for that rank which the kernel has not taken yet."""
        return any(lane.has_more_to_send for lane in self._by_rank[rank])

    def refuse_lost(self, ranks: set[int]) -> None:
        """Raise `PeerLost` when the connection to one of `ranks` is lost."""
        lost = {lane.rank: lane.lost for lane in self._lanes.values() if lane.lost and lane.rank in ranks}
        if lost:
            raise self.peers.gone(lost)

    def serve_now(self) -> bool:
        """Send and receive what can be without waiting; return whether there was anything, or is more to send."""
        self._require_owner()
        moved = self.moved_bytes
        self._serve(0.0)
        return moved != self.moved_bytes or self.has_more_to_send

    def wake(self) -> None:
        """End a `drain` in another thread."""
        os.eventfd_write(self._waker, 1)

    def leave(self, reason: str) -> None:
        """Tell all ranks why this one goes, and send nothing more. See [Note: last words]."""
        self._require_owner()
        words = memoryview(reason.encode()[:_LAST_WORDS_BYTES])
        for lane in self._lanes.values():
            if not lane.lost:
                lane.drop_frames_not_begun()
                lane.queue(_LAST_WORDS, words)
                self._pump_out(lane)
        with contextlib.suppress(CommError):  # what comes in meanwhile is of no use any more
            self.drain(_LAST_SECONDS)
        for lane in self._lanes.values():
            with contextlib.suppress(OSError):
                lane.socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Make all waits for other ranks fail at once. May be called from another thread, before `close`."""
        for lane in list(self._lanes.values()):
            with contextlib.suppress(OSError):
                lane.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections. The other ranks notice if they still wait for something."""
        for lane in self._lanes.values():
            lane.socket.close()
        self._lanes.clear()
        self._by_rank.clear()
        if not self._poll.closed:
            self._poll.close()
            os.close(self._waker)

    def _serve(self, seconds: float) -> bool:
        """Wait for the kernel and do what it asks for; return whether `wake` was called."""
        woken = False
        for descriptor, event in self._poll.poll(seconds):
            if descriptor == self._waker:
                os.eventfd_read(self._waker)
                woken = True
                continue
            if descriptor in self._watched:
                self._watched[descriptor]()
                continue
            lane = self._lanes[descriptor]
            if event & select.EPOLLOUT:
                self._pump_out(lane)
            if event & ~select.EPOLLOUT and not lane.lost:
                self._pump_in(lane)
        return woken

    # -- frames --------------------------------------------------------------------------------

    def _post(self, source: int, tag: int, row: memoryview, flight: PendingMessage) -> None:
        key = (source, tag)
        early = self._early.pop(key, None)
        if early is not None:
            self._check_length(source, len(early), len(row))
            row[:] = early
            return
        flight.waiting_for.add(source)
        self._posted[key] = (row, flight)

    def _send(self, target: int, tag: int, row: memoryview) -> int:
        lanes = self._by_rank[target]
        # Neighbours in rounds and neighbours in items (the tag's last three bits, and the rest) alternate.
        lane = lanes[(tag + (tag >> 3)) % self.used_lanes]
        if lane.lost:
            return len(row)  # waits for that rank raise its error
        lane.queue(tag, row)
        if not lane.asks_to_write:
            self._pump_out(lane)
        return len(row)

    def _pump_out(self, lane: Connection) -> None:
        try:
            self.moved_bytes += lane.send_what_fits()
        except OSError as problem:
            self._lose(lane, problem)
            return
        if lane.has_more_to_send != lane.asks_to_write:
            lane.asks_to_write = lane.has_more_to_send
            asked = select.EPOLLIN | (select.EPOLLOUT if lane.asks_to_write else 0)
            self._poll.modify(lane.socket.fileno(), asked)

    def _pump_in(self, lane: Connection) -> None:
        try:
            self.moved_bytes += lane.receive_what_is_there(
                partial(self._begin_frame, lane), partial(self._end_frame, lane)
            )
        except OSError as problem:
            self._lose(lane, problem)

    def _begin_frame(self, lane: Connection, length: int) -> memoryview:
        """Return where a frame of this length goes."""
        posted = self._posted.get((lane.rank, lane.tag))
        limit = _LAST_WORDS_BYTES if lane.tag == _LAST_WORDS else self._limit_bytes
        if length > limit:
            raise self.peers.too_long(lane.rank, length, limit)
        lane.is_early = posted is None
        if posted is None:
            return memoryview(bytearray(length))
        self._check_length(lane.rank, length, len(posted[0]))
        return posted[0]

    def _end_frame(self, lane: Connection, frame: memoryview) -> bool:
        """Take a frame that is there; return whether others may follow."""
        if lane.tag == _LAST_WORDS:
            self._lose(lane, ConnectionResetError(f"it failed: {bytes(frame).decode(errors='replace')}"))
            return False
        key = (lane.rank, lane.tag)
        posted = self._posted.pop(key, None)
        if posted is None:
            self._early[key] = frame
            return True
        row, flight = posted
        if lane.is_early:  # waited for only while it came
            self._check_length(lane.rank, len(frame), len(row))
            row[:] = frame
        flight.waiting_for.discard(lane.rank)
        return True

    def _lose(self, lane: Connection, problem: OSError) -> None:
        lane.lost = str(problem) or type(problem).__name__
        lane.drop_queue()
        self._poll.unregister(lane.socket.fileno())

    # -- what can go wrong -----------------------------------------------------------------------

    def _require_owner(self) -> None:
        thread = threading.current_thread()
        if self._owner is None:
            self._owner = thread
        elif self._owner is not thread:
            raise AssertionError(
                f"the thread {thread.name!r} uses a transport that belongs to {self._owner.name!r}: "
                "ask its thread, with `CommThread.run`"
            )

    def _refuse_long(self, message: Message, seat: GroupRank, tensor: torch.Tensor) -> None:
        byte_count = tensor.nbytes // (seat.size if message.operation == "all_to_all" else 1)
        if byte_count > self._limit_bytes:
            raise ValueError(
                f"{message.operation} of {byte_count} bytes for each rank: "
                f"at most {self._limit_bytes} are possible"
            )

    def _check_length(self, rank: int, theirs: int, ours: int) -> None:
        if theirs != ours:
            raise self.peers.other_length(rank, theirs, ours)


def _view(row: torch.Tensor) -> memoryview:
    array: Any = row.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)

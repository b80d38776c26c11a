"""Where announcements, links, order and results of one rank meet, and its control thread.

Everything is called with `lock` held, except where it says otherwise.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import CommError, FarandoleError, Mismatch, PeerLost, Stalled
from ..agree import gather, name_ranks, refuse_difference
from ..connections import connect_all
from ..transport import Transport
from ..world import World
from . import small
from .agreement import disagreement
from .data_plane import DataPlane
from .links import Frame, Link, Links
from .matcher import Announcement, Match, Matcher, Slot
from .numbers import Numbers
from .operation import Operation, PendingTicket
from .ordering import Ordering
from .process_sets import ProcessSets
from .request import NegotiationSettings, NullOperationLog, OperationLog
from .signature import Signature
from .stalls import StallWatch

_LEAVE_SECONDS = 2.0
_UNSENT_BYTES = 64 * 1024


class Hub:
    """The inside of one rank's engine."""

    def __init__(self, world: World, settings: NegotiationSettings, log: OperationLog) -> None:
        """Connect; to be called by all ranks."""
        self.lock = threading.RLock()
        self.rank, self.size = world.rank, world.size
        self.log = log
        self._logs = type(log) is not NullOperationLog
        self.sets = ProcessSets(world.size)
        self.numbers = Numbers(settings.cache_capacity)
        self.matcher = Matcher(world.rank, world.size)
        self.in_flight: dict[tuple[int, str], Operation] = {}
        self.join_ticket: PendingTicket | None = None
        self._joined: list[int] = []
        """On rank 0: who has joined, in order."""
        self._tables: list[dict[int, tuple[Signature, Slot]]] = [{} for _ in range(world.size)]
        self._over: FarandoleError | None = None
        self._closing = False
        self.links: Links | None = None
        self._plane: DataPlane | None = None
        self.hosts = [world.host]
        self.ordering = Ordering(world.rank, settings.fusion_bytes, self.send, self._begin)
        self.stalls = StallWatch(self, settings)
        self._thread: threading.Thread | None = None
        if world.size > 1:
            self._connect(world, settings)

    def _connect(self, world: World, settings: NegotiationSettings) -> None:
        told = gather(world, "negotiation", [world.host, vars(settings)])
        self.hosts = [host for host, _ in told]
        refuse_difference(world, "negotiation", "settings", [theirs for _, theirs in told])
        connections = connect_all(world, 2, world.timeout_seconds)
        self.links = Links([lanes[:1] for lanes in connections], self._handle)
        transport = Transport(
            world, timeout_seconds=world.timeout_seconds, made=[lanes[1:] for lanes in connections]
        )
        self._plane = DataPlane(transport, world.rank, self._activity)
        self._thread = threading.Thread(target=self._run, name="farandole-negotiation", daemon=True)
        self._thread.start()

    # -- this rank's part ------------------------------------------------------------------------

    def refuse_if_over(self) -> None:
        """Raise what ended the engine, if something did."""
        if self._over is not None:
            raise again(self._over)

    def announce(self, operation: Operation) -> None:
        """Tell all members that this rank is ready."""
        known, members = operation.known, operation.members
        signature = known.signature
        if self._logs:
            self.log.submitted(signature.name, operation.request.kind, operation.submitted_seconds)
        if (
            not operation.ticket.done()
        ):  # it failed with the first of its group; the others are owed its announcement
            self.in_flight[signature.key] = operation
        others = [rank for rank in members if rank != self.rank]
        if not known.is_told:
            known.is_told = True
            encoded = signature.encode()
            for rank in others:
                self.send(rank, Frame.DEFINE, encoded, known.number)
        mine: bytearray | None = None
        links = self.links
        if known.small:
            parts = small.payloads(operation, self.rank)
            for rank, part in zip(members, parts, strict=True):
                if rank == self.rank:
                    mine = part
                elif links is not None:
                    links.send(rank, Frame.DATA, known.number, part)
        else:
            for rank in others:
                self.send(rank, Frame.READY, b"", known.number)
        slot = self.matcher.slot(signature.key)
        self.matcher.add(slot, self.rank, Announcement(signature, self.matcher.epochs[self.rank], mine, operation))
        if self._logs:
            for rank in slot.ready:  # some were here before us
                self.log.rank_ready(signature.name, rank, operation.submitted_seconds)
        self._settle(slot)
        if links is not None and not operation.ticket.done():
            self._refuse_departed(operation, slot)

    def join(self) -> PendingTicket:
        """This rank has no more data."""
        if self.join_ticket is not None:
            return self.join_ticket
        ticket = self.join_ticket = PendingTicket(self.send_now)
        for rank in range(self.size):
            self.send(rank, Frame.JOIN)
        self._take_join(self.rank)
        self.send_soon()
        return ticket

    def send(self, rank: int, kind: Frame, data: bytes = b"", number: int = 0) -> None:
        """Queue a frame; see `send_soon`."""
        if self.links is not None and rank != self.rank:
            self.links.send(rank, kind, number, data)

    def send_soon(self) -> None:
        """See to it that what is queued leaves. See [Note: when frames leave] in `engine`."""
        links = self.links
        if links is None:
            return
        if len(self.in_flight) <= 1:
            self.ordering.advance()
            links.flush()
            self.stalls.arm()
        elif links.has_unsent:
            links.wake()

    def send_now(self) -> None:
        """Send what is queued, before somebody waits. Takes the lock."""
        if self.links is not None:
            with self.lock:
                if self._over is None:
                    self.links.flush()

    # -- results ---------------------------------------------------------------------------------

    def _settle(self, slot: Slot) -> None:
        """Finish or begin what is complete."""
        while (match := self.matcher.take(slot)) is not None:
            self._complete(match)
        if not slot.filled and not slot.users:
            self.matcher.release(slot)

    def _complete(self, match: Match) -> None:
        operation: Operation = match.own
        group = operation.group
        if operation.ticket.done():
            return  # it failed with its group; its partners were owed this match
        operation.told = {rank: each.signature for rank, each in match.told.items()}
        operation.absent = match.absent
        said = tuple(operation.told.values())
        if match.absent or operation.known.agreed != said:
            problem = disagreement(operation.told, match.absent, self.hosts)
            if problem:
                self._fail(operation, problem)
                return
            operation.known.agreed = () if match.absent else said
        operation.payloads = [each.payload for each in match.told.values()]
        if group is None:
            self._go([operation])
            return
        group.not_ready -= 1
        if not group.not_ready:
            self._go(group.operations)

    def _go(self, operations: list[Operation]) -> None:
        """All members of all these are ready, and agree."""
        now = time.monotonic()
        for operation in operations:
            operation.began_seconds = now
            if self._logs:
                self.log.begun(operation.signature.name, operation.request.kind, now)
        if all(None not in operation.payloads for operation in operations):
            for operation in operations:
                result = self._small_result(operation)
                if self._logs:
                    kind = operation.signature.kind.upper()
                    self.log.activity([operation.signature.name], f"TCP_{kind}", now, time.monotonic())
                self._finish(operation, result)
            return
        for operation in operations:
            operation.payloads = []
        self.ordering.ready(operations)

    def _small_result(self, operation: Operation) -> Any:
        signature = operation.signature
        if signature.kind == "add_process_set":
            return self.sets.add(signature.splits)
        if signature.kind == "remove_process_set":
            removed = self.sets.remove(signature.splits[0])
            if removed is not None and self._plane is not None:
                self._plane.forget_codecs(removed.serial)
            return removed is not None
        return small.result(operation, [data for data in operation.payloads if data is not None], self.rank)

    def _finish(self, operation: Operation, value: Any, error: Exception | None = None) -> None:
        if operation.ticket.done():
            return
        self.in_flight.pop(operation.signature.key, None)
        operation.payloads = []
        if self._logs:
            signature = operation.signature
            text = "" if error is None else str(error)
            self.log.finished(signature.name, signature.dtype, signature.shape, time.monotonic(), text)
        operation.ticket.finish(value, error)

    def _fail(self, operation: Operation, problem: str) -> None:
        """The members do not agree; all of the operation's group fail."""
        for each in operation.group.operations if operation.group is not None else [operation]:
            self._finish(
                each,
                None,
                Mismatch(problem, rank=self.rank, operation=f"{operation.request.kind} {operation.request.name}"),
            )

    # -- large operations ------------------------------------------------------------------------

    def _begin(self, number: int, operations: Sequence[Operation]) -> None:
        assert self._plane is not None, "large operations have other members"

        def done(results: Sequence[Any], problem: BaseException | None) -> None:
            """Called from the data thread, without the lock."""
            with self.lock:
                if problem is not None:
                    self._data_failed(problem)
                    return
                for operation, value in zip(operations, results, strict=True):
                    self._finish(operation, value)
                self.ordering.ended(number, operations[0].present[0])
                self.ordering.advance()
                if self._over is None and self.links is not None:
                    self.links.flush()

        self._plane.start(number, operations, done)

    def _activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """Called from the data thread, without the lock."""
        if self._logs:
            with self.lock:
                self.log.activity(names, activity, begin_seconds, end_seconds)

    def _data_failed(self, problem: BaseException) -> None:
        if isinstance(problem, CommError):
            self.end(problem, tell=not isinstance(problem, PeerLost))
        else:
            text = f"{type(problem).__name__}: {problem}"
            self.end(CommError(text, rank=self.rank, operation="moving data"), tell=True)

    # -- the end ---------------------------------------------------------------------------------

    def end(self, error: FarandoleError, *, tell: bool = False) -> None:
        """Fail all that is on its way, and all that will be submitted."""
        if self._over is not None:
            return
        self._over = error
        if tell:
            text = f"{type(error).__name__}\n{error.message.partition(': ')[2]}\n{error.remedy}"
            for rank in range(self.size):
                self.send(rank, Frame.FAIL, text.encode())
            if self.links is not None:
                self.links.flush()
        for operation in list(self.in_flight.values()):
            self._finish(operation, None, again(error))
        self.in_flight.clear()
        if self.join_ticket is not None:
            self.join_ticket.finish(None, again(error))
        if self._plane is not None:
            self._plane.abort()

    def close(self) -> None:
        """Leave. Takes the lock. May be called twice."""
        with self.lock:
            if self._closing:
                return
            self._closing = True
            if self.links is not None:
                with contextlib.suppress(OSError):
                    self.links.flush()
                self.links.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self.lock:
            closed = CommError("the engine was closed", rank=self.rank, operation="negotiation")
            unfinished = bool(self.in_flight) or self.join_ticket is not None
            self.end(closed) if unfinished else None
            self._over = closed if self._over is None else self._over
            if self.links is not None:
                self.links.leave(_LEAVE_SECONDS)
        if self._plane is not None:
            self._plane.close()

    def _refuse_departed(self, operation: Operation, slot: Slot) -> None:
        """End when the operation waits for a rank that has left."""
        assert self.links is not None, "it has other members"
        for rank in self.matcher.missing(operation, slot):
            link = self.links.by_rank[rank]
            if link is not None and (link.left or link.closed):
                self.end(self._departed(rank, link))
                return

    def _departed(self, rank: int, link: Link) -> PeerLost:
        what = "has left: it closed its engine" if link.left else f"is gone: {link.closed}"
        return PeerLost(
            f"{name_ranks([rank])} (on {self.hosts[rank]}) {what}",
            rank=self.rank,
            operation="negotiation",
            remedy="look for the first failure among the other ranks",
        )

    # -- the control thread ----------------------------------------------------------------------

    def _run(self) -> None:
        assert self.links is not None, "the thread serves links"
        torch.set_grad_enabled(False)
        seconds: float | None = None
        while True:
            events = self.links.poll(seconds)
            with self.lock:
                if self._closing:
                    return
                try:
                    for link in self.links.serve(events):
                        self._take_end(link)
                    if self._over is None:
                        self.ordering.advance()
                        self.links.flush()
                    seconds = self.stalls.look(has_slept=not events)
                except Exception as problem:  # a frame that makes no sense, or no memory for a result
                    self._data_failed(problem)

    def _handle(self, rank: int, kind: int, number: int, data: memoryview) -> None:
        """Take one frame."""
        if kind in (Frame.DATA, Frame.READY):
            signature, slot = self._tables[rank][number]
            payload = bytearray(data) if kind == Frame.DATA else None
            matcher = self.matcher
            matcher.add(slot, rank, Announcement(signature, matcher.epochs[rank], payload))
            if self._logs and signature.key in self.in_flight:
                self.log.rank_ready(signature.name, rank, time.monotonic())
            if self.rank in slot.queues:
                self._settle(slot)
        elif kind == Frame.DEFINE:
            signature = Signature.decode(bytes(data))
            slot = self.matcher.slot(signature.key)
            slot.users += 1
            old = self._tables[rank].get(number)
            self._tables[rank][number] = (signature, slot)
            if old is not None:
                old[1].users -= 1
                self.matcher.release(old[1])
        else:
            self._handle_rare(rank, kind, number, bytes(data))

    def _handle_rare(self, rank: int, kind: int, number: int, data: bytes) -> None:
        if kind == Frame.JOIN:
            self._take_join(rank)
        elif kind == Frame.JOINED:
            self._take_joined(number)
        elif kind == Frame.UNIT:
            self.ordering.take_unit(data)
        elif kind == Frame.RELEASE:
            self.ordering.take_release(data)
        elif kind == Frame.DONE:
            self.ordering.take_done(data)
        elif kind in (Frame.OVERDUE, Frame.WHERE, Frame.HERE):
            self.stalls.take(rank, kind, data)
        elif kind == Frame.FAIL:
            name, text, remedy = data.decode().split("\n", 2)
            made = Stalled if name == "Stalled" else CommError
            where = f"{name_ranks([rank])} (on {self.hosts[rank]})"
            text = text if made is Stalled else f"{where} failed: {text}"
            self.end(made(text, rank=self.rank, operation="negotiation", remedy=remedy))
        elif kind == Frame.LEAVE:
            assert self.links is not None, "it came by a link"
            link = self.links.by_rank[rank]
            assert link is not None, "it came by this link"
            link.left = True
        else:
            raise CommError(f"rank {rank} sent a frame of type {kind}", rank=self.rank, operation="negotiation")

    def _take_join(self, rank: int) -> None:
        for slot in self.matcher.joined(rank):
            self._settle(slot)
        if self.rank == 0:
            self._joined.append(rank)
            if len(self._joined) == self.size:
                self._joined = []
                for other in range(1, self.size):
                    self.send(other, Frame.JOINED, number=rank)
                self._take_joined(rank)

    def _take_joined(self, last: int) -> None:
        ticket, self.join_ticket = self.join_ticket, None
        if ticket is not None:
            ticket.finish(last)

    def _take_end(self, link: Link) -> None:
        """The link of a rank was closed: hang up, and end when something waits for that rank."""
        assert self.links is not None, "it is one of them"
        left = link.left
        self.links.hang_up(link)
        if self._over is not None:
            return
        waits = self.join_ticket is not None
        for operation in list(self.in_flight.values()):
            slot = self.matcher.slots.get(operation.signature.key)
            missing = [] if slot is None else self.matcher.missing(operation, slot)
            waits = waits or link.rank in missing
        unreleased = self.ordering.waiting()
        waits = waits or any(link.rank in (0, *operation.present) for operation in unreleased)
        if waits or not left:
            self.end(self._departed(link.rank, link))


def again(error: FarandoleError) -> FarandoleError:
    """Return a copy, so that each who raises it has a traceback of its own."""
    import copy

    return copy.copy(error)

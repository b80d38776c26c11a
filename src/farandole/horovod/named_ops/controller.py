"""Where announcements, links, order and results of one rank meet, and its control thread.

Everything is called with `lock` held, except where it says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ...comm.transport.connect import connect_all
from ...comm.transport.rank_group import host_groups
from ...comm.transport.transport import Transport
from ...comm.world.store_sync import all_gather_json, require_equal
from ...comm.world.world import World
from ...core.vocabulary.errors import Mismatch
from .channel import ControlChannel, Events, Frame
from .data_plane import DataPlane
from .driver import ControllerState, Driver
from .group_thread import DeviceGroups, device_kind, inline_payloads, inline_result
from .launch_order import LaunchOrder
from .matcher import Announcement, Match, MatchSlot, disagreement
from .operations import NamedOpsSettings, Operation, OperationLog, ProcessSets, ResponseCache, Signature
from .shutdown import Joins, PendingJoin, Shutdown
from .stall_inspector import StallInspector

# What the other ranks say: each frame finds its place here. Called with the engine's lock held.
_DATA = int(Frame.DATA)
_ANNOUNCEMENTS = (_DATA, int(Frame.READY))
"""As plain numbers: most frames are these."""


class FrameDispatcher:
    """Takes the frames of all links."""

    def __init__(
        self, state: ControllerState, ordering: LaunchOrder, joins: Joins, stalls: StallInspector,
        ending: Shutdown, *, settle: Callable[[MatchSlot], None], joined: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`settle` finishes what is complete under a name; `joined` notes that a rank has joined."""
        self._state, self._settle = state, settle
        self._tables: list[dict[int, tuple[Signature, MatchSlot]]] = [{} for _ in range(state.size)]
        """What the numbers of each rank stand for."""
        self._rare: dict[int, Callable[[int, int, bytes], None]] = {
            Frame.JOIN: lambda rank, number, data: joined(rank),
            Frame.JOIN_WISH: lambda rank, number, data: joins.take_wish(rank),
            Frame.JOIN_PLACE: lambda rank, number, data: joins.take_place(is_last=bool(number)),
            Frame.JOINED: lambda rank, number, data: joins.take_joined(number),
            Frame.UNIT: lambda rank, number, data: ordering.take_unit(data),
            Frame.RELEASE: lambda rank, number, data: ordering.take_release(data),
            Frame.DONE: lambda rank, number, data: ordering.take_done(data),
            Frame.OVERDUE: lambda rank, number, data: stalls.take(rank, Frame.OVERDUE, data),
            Frame.WHERE: lambda rank, number, data: stalls.take(rank, Frame.WHERE, data),
            Frame.HERE: lambda rank, number, data: stalls.take(rank, Frame.HERE, data),
            Frame.FAIL: lambda rank, number, data: ending.take_failure(rank, data),
            Frame.LEAVE: lambda rank, number, data: ending.take_leave(rank, number - 1),
        }

    def take(self, rank: int, kind: int, number: int, data: memoryview) -> None:
        """Take one frame."""
        state = self._state
        if kind in _ANNOUNCEMENTS:
            signature, slot = self._tables[rank][number]
            payload = bytearray(data) if kind == _DATA else None
            matcher = state.matcher
            matcher.add(slot, rank, Announcement(signature, matcher.epochs[rank], payload))
            if state.log.is_on and signature.key in state.in_flight:
                state.log.rank_ready(signature.name, rank, time.monotonic())
            if state.rank in slot.queues:
                self._settle(slot)
        elif kind == Frame.DEFINE:
            self._define(rank, number, Signature.decode(bytes(data)))
        elif kind in self._rare:
            self._rare[kind](rank, number, bytes(data))
        else:
            raise state.error(f"rank {rank} sent a frame of type {kind}")

    def _define(self, rank: int, number: int, signature: Signature) -> None:
        slot = self._state.matcher.slot(signature.key)
        slot.users += 1
        old = self._tables[rank].get(number)
        self._tables[rank][number] = (signature, slot)
        if old is not None:
            old[1].users -= 1
            self._state.matcher.release(old[1])


_LEAVE_SECONDS = 2.0
_BURST_SECONDS = 0.0005
"""Operations that follow each other faster than this leave together."""


class Controller:
    """One rank's part in negotiating named operations."""

    def __init__(self, world: World, settings: NamedOpsSettings, log: OperationLog) -> None:
        """Connect; to be called by all ranks."""
        self.state = ControllerState(world, log)
        self.sets = ProcessSets(world.size)
        self.numbers = ResponseCache(settings.cache_capacity)
        self.ordering = LaunchOrder(world.rank, settings.fusion_bytes, self.state.send, self._begin)
        self.joins = Joins(world.rank, self.state.matcher.epochs, self.state.send, self.joined)
        self.ending = Shutdown(self.state, self.joins, self.ordering)
        self.stalls = StallInspector(self.state, settings, self.ending.end)
        self.driver = Driver(self.state, self._serve, has_free_cores=world.local_size <= (os.cpu_count() or 1))
        self._closing = False
        self.by_host = False
        """Whether large sums of all ranks meet inside each host first."""
        self.devices: DeviceGroups | None = None
        """Groups for tensors on this rank's device, where all ranks have one."""
        self._sent_seconds = 0.0
        """When a submitter last sent."""
        self._waited = True
        """Whether a thread has waited since the last submission: then the next one is no burst."""
        self._thread: threading.Thread | None = None
        if world.size > 1:
            self._connect(world, settings)

    def _connect(self, world: World, settings: NamedOpsSettings) -> None:
        about = [world.host, world.node_rank, vars(settings), device_kind(world)]
        told = all_gather_json(world, "negotiation", about)
        self.state.hosts = [host for host, *_ in told]
        require_equal(world, "negotiation", "settings", [theirs for *_, theirs, _ in told])
        nodes = [node for _, node, *_ in told]
        kinds = {kind for *_, kind in told}
        self.devices = DeviceGroups(world) if len(kinds) == 1 and "" not in kinds else None
        self.by_host = settings.by_host and host_groups(range(world.size), world.rank, nodes) is not None
        dispatcher = FrameDispatcher(
            self.state, self.ordering, self.joins, self.stalls, self.ending, settle=self.settle, joined=self.joined
        )
        connections = connect_all(world, 2, world.timeout_seconds)
        self.state.links = ControlChannel([lanes[:1] for lanes in connections], dispatcher.take)
        transport = Transport(
            world, timeout_seconds=world.timeout_seconds, made=[lanes[1:] for lanes in connections]
        )
        hosts = nodes if settings.by_host else None
        self.state.plane = DataPlane(transport, world.rank, self._activity, hosts, self.devices)
        self._thread = threading.Thread(target=self._run, name="farandole-negotiation", daemon=True)
        self._thread.start()

    # -- this rank's part ------------------------------------------------------------------------

    def announce(self, operation: Operation) -> None:
        """Tell all members that this rank is ready."""
        state = self.state
        known, members = operation.known, operation.members
        signature = known.signature
        logs = state.log.is_on
        if logs:
            state.log.submitted(signature.name, operation.request.kind, operation.submitted_seconds)
        if not operation.ticket.is_done:  # else it failed with its group, and only the others need to hear of it
            state.in_flight[known.key] = operation
        if not known.is_told:
            known.is_told = True
            encoded = signature.encode()
            for rank in members:
                state.send(rank, Frame.DEFINE, encoded, known.number)
        mine: bytearray | None = None
        links = state.links
        if known.small:
            parts = inline_payloads(operation, state.rank)
            for rank, part in zip(members, parts, strict=True):
                if rank == state.rank:
                    mine = part
                elif links is not None:
                    links.send(rank, Frame.DATA, known.number, part)
            sent_bytes = sum(map(len, parts)) - len(mine or b"")
            operation.ticket.sent_at_once(operation.submitted_seconds, sent_bytes)
        else:
            self.driver.end_loan()
            for rank in members:
                state.send(rank, Frame.READY, b"", known.number)
        slot = state.matcher.slot(known.key)
        epoch = state.matcher.epochs[state.rank]
        state.matcher.add(slot, state.rank, Announcement(signature, epoch, mine, operation))
        if logs:
            for rank in slot.ready:  # some were here before us
                state.log.rank_ready(signature.name, rank, operation.submitted_seconds)
        self.settle(slot)
        if links is not None and links.gone and not operation.ticket.is_done:
            self.ending.refuse_departed(operation, slot)

    def join(self) -> PendingJoin:
        """This rank has no more data."""
        self.driver.end_loan()
        join = self.joins.begin(self.send_now)
        if self.state.links is not None and self.state.links.gone and not join.done():
            self.ending.refuse_to_join_without()
        self.send_soon()
        return join

    def send_soon(self) -> None:
        """See to it that what is queued leaves. See [Note: when frames leave] in `engine`."""
        state = self.state
        links = state.links
        if links is None:
            return
        self.stalls.arm()
        if len(state.in_flight) <= 1:
            self.ordering.advance()
            now = time.monotonic()
            burst = not self._waited and now - self._sent_seconds < _BURST_SECONDS
            self._waited, self._sent_seconds = False, now
            if not burst:
                links.flush()
                return
        else:
            self.driver.end_loan()
        if links.has_unsent:
            links.wake()

    def send_now(self) -> None:
        """Send what is queued, before a thread waits. Takes the lock."""
        state = self.state
        state.refuse_reentry()
        self._waited = True
        if state.links is not None and state.links.has_unsent:
            with state.lock:
                if self.ending.error is None:
                    state.links.flush()

    # -- results ---------------------------------------------------------------------------------

    def settle(self, slot: MatchSlot) -> None:
        """Finish or begin what is complete under a name."""
        while (match := self.state.matcher.take(slot)) is not None:
            self._complete(match)
        if not slot.filled and not slot.users:
            self.state.matcher.release(slot)

    def joined(self, rank: int) -> None:
        """Note that `rank` has joined: what waits only for it is complete."""
        for slot in self.state.matcher.joined(rank):
            self.settle(slot)

    def _complete(self, match: Match) -> None:
        operation: Operation = match.own
        group = operation.group
        if operation.ticket.is_done:
            return  # it failed with its group; its partners were owed this match
        operation.told = {rank: each.signature for rank, each in match.told.items()}
        operation.absent = match.absent
        said = tuple(operation.told.values())
        if match.absent or operation.known.agreed != said:
            problem = disagreement(operation.told, match.absent, self.state.hosts)
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
        state = self.state
        logs, now = state.log.is_on, 0.0
        if logs:
            now = time.monotonic()
            for operation in operations:
                state.log.begun(operation.signature.name, operation.request.kind, now)
        if operations[0].known.small and not any(None in operation.payloads for operation in operations):
            for operation in operations:
                result = self._small_result(operation)
                if logs:
                    kind = operation.signature.kind.upper()
                    state.log.activity([operation.signature.name], f"TCP_{kind}", now, time.monotonic())
                state.finish(operation, result)
            return
        for operation in operations:
            operation.payloads = []
        self.ordering.ready(operations)

    def _small_result(self, operation: Operation) -> Any:
        signature = operation.known.signature
        if signature.kind == "add_process_set":
            return self.sets.add(signature.splits)
        if signature.kind == "remove_process_set":
            removed = self.sets.remove(signature.splits[0])
            if removed is not None and self.state.plane is not None:
                self.state.plane.forget_codecs(removed.serial)
            return removed is not None
        return inline_result(operation, cast("list[bytearray]", operation.payloads), self.state.rank)

    def _fail(self, operation: Operation, problem: str) -> None:
        """The members do not agree; all of the operation's group fail."""
        name = f"{operation.request.kind} {operation.request.name}"
        for each in operation.group.operations if operation.group is not None else [operation]:
            self.state.finish(each, None, Mismatch(problem, rank=self.state.rank, operation=name))

    # -- large operations ------------------------------------------------------------------------

    def _begin(self, number: int, operations: Sequence[Operation]) -> None:
        state = self.state
        assert state.plane is not None, "large operations have other members"

        def done(results: Sequence[Any], problem: BaseException | None) -> None:
            """Called from the data thread, without the lock."""
            with state.lock:
                if problem is not None:
                    self.ending.data_failed(problem)
                    return
                for operation, value in zip(operations, results, strict=True):
                    state.finish(operation, value)
                self.ordering.ended(number, operations[0].present[0])
                self.ordering.advance()
                if self.ending.error is None and state.links is not None:
                    state.links.flush()

        state.plane.start(number, operations, done)

    def _activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """Called from the data thread, without the lock."""
        if self.state.log.is_on:
            with self.state.lock:
                self.state.log.activity(names, activity, begin_seconds, end_seconds)

    def interrupted(self, interrupt: BaseException, while_it: str) -> None:
        """End on all ranks: a signal's handler raised something in the thread that sent or read."""
        text = f"interrupted while it {while_it} ({type(interrupt).__name__})"
        self.ending.end(self.state.error(text), tell=True)

    # -- the control thread ----------------------------------------------------------------------

    def close(self) -> None:
        """Leave. Takes the lock. May be called twice."""
        state = self.state
        state.refuse_reentry()
        with state.lock:
            if self._closing:
                return
            self._closing = True
            if state.links is not None:
                with contextlib.suppress(OSError):
                    state.links.flush()
                state.links.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with state.lock:
            self.ending.closed()
        self.driver.wait_until_free()
        with state.lock:
            if state.links is not None:
                state.links.leave(_LEAVE_SECONDS)
        if state.plane is not None:
            state.plane.close()

    def forget(self) -> threading.RLock:
        """In a forked child: refuse all calls, and send nothing. Returns the new lock."""
        state = self.state
        state.lock = threading.RLock()
        self._closing = True
        self.ending.error = state.error("this process was forked from that rank, and is no rank itself")
        state.in_flight.clear()
        state.links = state.plane = None
        self._thread = None
        self.driver.forget()
        return state.lock

    def _run(self) -> None:
        state = self.state
        assert state.links is not None, "the thread serves links"
        torch.set_grad_enabled(False)
        seconds: float | None = None
        loan_seconds: float | None = None
        while True:
            events = state.links.poll(seconds if loan_seconds is None else loan_seconds)
            with state.lock:
                if self._closing:
                    return
                self._serve(events)
                # A sleep that was cut short for a loan says nothing about stalls.
                has_slept = not events and loan_seconds is None
                loan_seconds = self.driver.look_after()
                try:
                    seconds = self.stalls.look(has_slept=has_slept)
                except Exception as problem:  # the report cannot be written, or sent
                    self.ending.data_failed(problem)

    def _serve(self, events: Events) -> None:
        """Take what arrived, and send what follows from it."""
        links = self.state.links
        assert links is not None, "what arrived came by links"
        try:
            for link in links.serve(events):
                self.ending.take_end_of(link)
            if self.ending.error is None:
                self.ordering.advance()
                links.flush()
        except Exception as problem:  # a frame that makes no sense, or no memory for a result
            self.ending.data_failed(problem)
        except BaseException as interrupt:
            # What was being read is lost, for all operations.
            self.interrupted(interrupt, "read what others sent")
            raise

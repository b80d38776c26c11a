"""The negotiation engine: operations that ranks submit in any order, matched by name.

[Note: two threads] The control thread sleeps in epoll until a frame arrives; it matches announcements and finishes
small operations. The data thread, made when it is first needed, moves large ones. Submitters do what they can
themselves: the last one to be ready finishes a small operation in its own `submit`, and a thread that waits for a
small one reads what arrives instead of the control thread (see [Note: who reads the links] in `driver`).

[Note: when frames leave] The first operation on its way is sent by its submitter: nothing is as fast. What is
submitted soon after it, or while others are on their way, is collected, and leaves when the control thread wakes
up or a thread starts to wait; a thousand operations need few packets. This holds also for operations that are
complete when they are submitted: the rank that is behind would otherwise send, and wake the others, for each. What
follows a wait for a result is a first operation again: no thread is woken to send it.

The smallest use::

    engine = NamedOpsEngine(fd.init())
    ticket, = engine.submit([Request("loss", "allreduce", loss, reduction="average")])
    mean = ticket.wait()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ...comm.device.streams import streams_of
from ...comm.world.world import World
from ...core.vocabulary.errors import ConfigError
from . import matcher as validation
from .controller import Controller
from .group_thread import is_small
from .operations import (
    EVERYBODY,
    Group,
    JoinTicket,
    NamedOpsSettings,
    NullOperationLog,
    Operation,
    OperationLog,
    PendingTicket,
    Request,
    Signature,
    Ticket,
    cache_key,
)

_SETS = "farandole.process_sets"


class NamedOpsEngine:
    """Runs named operations. To be made by all ranks; `close` ends it, and so does closing the world."""

    def __init__(
        self,
        world: World,
        settings: NamedOpsSettings | None = None,
        log: OperationLog | None = None,
    ) -> None:
        """Connect to all ranks. Raises `Mismatch` when their settings differ, `Stalled` when one does not come."""
        self._rank = world.rank
        self._controller = Controller(world, settings or NamedOpsSettings(), log or NullOperationLog())
        self._lock = self._controller.state.lock
        self._changing_sets = threading.Lock()
        world.session.call_on_close(self.close)
        world.session.call_in_forked_child(self._forget)

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Begin operations and return a ticket for each; several are a group and run all or none.

        Raises `ConfigError` at once for what this rank alone can see is wrong: a name that is in flight, a
        process set that it is no member of or that does not exist, splits that do not fit, a type that cannot
        travel. Raises `CommError` when the engine has been closed, and in a signal handler that interrupts its
        thread within the engine.
        """
        controller = self._controller
        controller.state.refuse_reentry()
        with self._lock:
            controller.ending.refuse_if_over()
            if len(requests) == 1:  # the usual case, without the work for groups
                operation = self._operation(requests[0], ())
                self._announce((operation,))
                return [operation.ticket]
            group = tuple(request.name for request in requests)
            if len(set(group)) != len(group):
                raise ConfigError(validation.DUPLICATE)
            operations = [self._operation(request, group) for request in requests]
            together = Group(operations, len(operations))
            for operation in operations:
                operation.group = together
            self._announce(operations)
        return [operation.ticket for operation in operations]

    def join(self) -> JoinTicket:
        """Say that this rank has no more data: it contributes zeros to allreduces until all ranks have joined."""
        self._controller.state.refuse_reentry()
        with self._lock:
            self._controller.ending.refuse_if_over()
            return self._controller.join()

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a set of ranks and return its number, the lowest free; to be called by all ranks.

        Raises `ConfigError` for ranks that do not exist or are named twice.
        """
        chosen = tuple(sorted(ranks))
        size = len(self._controller.sets.by_number[EVERYBODY].ranks)
        if not chosen or len(set(chosen)) != len(chosen) or not 0 <= chosen[0] <= chosen[-1] < size:
            raise ConfigError(
                f"a process set of ranks {list(ranks)}: expected different ones from 0 to {size - 1}"
            )
        with self._changing_sets:
            number: int = self._change_sets("add_process_set", chosen).wait()
            if self._controller.devices is not None:
                self._controller.devices.add(chosen)
        return number

    def remove_process_set(self, number: int) -> bool:
        """Forget a set; to be called by all ranks. False for the set of all ranks and for an unknown one.

        Operations of the set that are on their way go on.
        """
        with self._changing_sets:
            removed: bool = self._change_sets("remove_process_set", (number,)).wait()
        return removed

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Ranks by number of set."""
        with self._lock:
            return {number: each.ranks for number, each in sorted(self._controller.sets.by_number.items())}

    @property
    def by_host(self) -> bool:
        """Whether large sums of all ranks meet inside each host first; the same on all ranks."""
        return self._controller.by_host

    def close(self) -> None:
        """End; operations in flight fail on all ranks. May be called twice."""
        self._controller.close()

    def _forget(self) -> None:
        """In a forked child: the threads are not there, and a lock may be held by one for ever."""
        self._changing_sets = threading.Lock()
        self._lock = self._controller.forget()

    def _change_sets(self, kind: str, about: tuple[int, ...]) -> Ticket:
        controller = self._controller
        controller.state.refuse_reentry()
        with self._lock:
            controller.ending.refuse_if_over()
            everyone = controller.sets.by_number[EVERYBODY]
            known = controller.numbers.make(
                (kind, about), Signature(_SETS, everyone.serial, kind, splits=about), small=True
            )
            ticket = PendingTicket(controller.send_now)
            request = Request(_SETS, "barrier")
            self._announce((Operation(request, known, None, everyone.ranks, ticket, time.monotonic()),))
        return ticket

    def _announce(self, operations: Sequence[Operation]) -> None:
        controller = self._controller
        try:
            for operation in operations:
                controller.announce(operation)
            controller.send_soon()
        except BaseException as interrupt:  # others may have been told a half of it
            controller.interrupted(interrupt, "announced an operation")
            raise

    def _operation(self, request: Request, group: tuple[str, ...]) -> Operation:
        """Return the operation of a request, after all that this rank alone can check."""
        controller = self._controller
        chosen = controller.sets.by_number.get(request.process_set)
        if chosen is None:
            raise validation.unknown_set(request.kind, request.process_set)
        if self._rank not in chosen.ranks:
            raise validation.not_a_member(request.kind, self._rank)
        if (chosen.serial, request.name) in controller.state.in_flight:
            raise ConfigError(validation.DUPLICATE)
        if controller.joins.pending is not None:
            raise ConfigError(
                f"{request.kind} {request.name}: rank {self._rank} has joined", remedy="wait for the join first"
            )
        tensor = request.tensor
        about = cache_key(request, chosen.serial, group)
        known = controller.numbers.find(about)
        if known is None:
            validation.check(request, chosen.ranks)
            size = len(chosen.ranks)
            signature = validation.sign(request, chosen.serial, size, group)
            known = controller.numbers.make(about, signature, small=is_small(signature, size))
        event = None
        if tensor is not None:
            if not tensor.is_contiguous():
                raise ConfigError(
                    f"{request.kind} {request.name}: Tensor is required to be contiguous.",
                    remedy=f"it has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
                )
            tensor = tensor.detach()
            streams = streams_of(tensor.device)
            event = None if streams is None else streams.record()
        ticket = PendingTicket(controller.send_now, controller.driver if known.small else None)
        return Operation(request, known, tensor, chosen.ranks, ticket, time.monotonic(), ready_event=event)

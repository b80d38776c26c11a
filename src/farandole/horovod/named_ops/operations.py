"""One named operation: signature, request, cache entry, handle; and the sets of ranks that operations are of.

[Note: numbers] The first time a rank announces a signature it tells its peers a number for it; then it says only
the number. Each rank has its own numbers, so there is nothing to agree on. When they run out, the one that was
used least recently is given to another signature, in the same stream as everything else: a reader of the stream
in order always knows what a number means. An announcement that has arrived keeps its signature, whatever the
number means later.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ...comm.device.streams import streams_of
from ...comm.transport.comm_thread import BucketWork
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import ConfigError
from .channel import NUMBER_MASK

# The signature of a named operation, which its members compare, and its encoding.
#
# A signature is sent once to each peer and given a number there; from then on the number stands for it.
# See [Note: numbers].

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
"""Types that can travel, by name."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Signature(NamedTuple):
    """One rank's view of an operation: all but the numbers in its tensor."""

    name: str
    process_set: int
    """Serial number of the set; never used again after it was removed."""
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    reduction: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    """Rows for each member (alltoall); the ranks of a set that is to be added."""
    codec: str = NONE
    device: str = "cpu"
    group: tuple[str, ...] = ()
    """Names of all operations that run together with this one, or none of them; empty: it is alone."""
    chosen_with: str = ""
    """See `Request`; empty for codecs that are not chosen."""

    @property
    def key(self) -> tuple[int, str]:
        """What must be equal for operations to meet."""
        return self.process_set, self.name

    @property
    def is_exact(self) -> bool:
        """Whether no codec changes what is sent."""
        return self.codec == NONE

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the first dimension."""
        row = DTYPES[self.dtype].itemsize
        for length in self.shape[1:]:
            row *= length
        return row

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        if not self.dtype:
            return 0
        return self.row_bytes * self.shape[0] if self.shape else self.row_bytes

    def encode(self) -> bytes:
        """Return what `decode` reads."""
        return json.dumps(self, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Signature:
        """Read a signature that a peer sent; raise `ValueError` for anything else."""
        told: Any = json.loads(data)
        if not isinstance(told, list) or len(told) != len(cls._fields):
            raise ValueError(f"not a signature: {data[:80]!r}")
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in told]
        return cls(*values)


# Sets of ranks by number. Changed on all ranks by the same operations in the same order, so always alike.


@dataclass(frozen=True, slots=True)
class RankSet:
    """Ranks, ascending. `serial` is never used again, `number` is when the set has been removed."""

    number: int
    serial: int
    ranks: tuple[int, ...]


class ProcessSets:
    """All sets of a job."""

    def __init__(self, size: int) -> None:
        self.by_number = {EVERYBODY: RankSet(EVERYBODY, 0, tuple(range(size)))}
        self._next_serial = 1

    def add(self, ranks: tuple[int, ...]) -> int:
        """Add a set; return its number, the lowest free."""
        number = next(n for n in range(len(self.by_number) + 1) if n not in self.by_number)
        self.by_number[number] = RankSet(number, self._next_serial, ranks)
        self._next_serial += 1
        return number

    def remove(self, number: int) -> RankSet | None:
        """Remove a set and return it; None for the global set and one that does not exist."""
        return None if number == EVERYBODY else self.by_number.pop(number, None)


# What a rank asks for by name, and what it gets: the vocabulary of the negotiation engine.
#
# Ranks submit named operations in any order and from any thread. An operation runs once every member of its
# process set has submitted it; what they ask for must agree, or it fails on all of them with the same error and
# everything else goes on.

Kind = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join"]
Reduction = Literal["sum", "average", "min", "max", "product", "adasum"]

NO_NAME = "noname"
"""The second part of the name of an operation that was given none: see `is_unnamed`."""
EVERYBODY = 0
"""The process set of all ranks."""


def is_unnamed(name: str) -> bool:
    """Return whether this stands for no name, as ``allreduce.noname.7`` does: it never comes again."""
    return name.split(".", 2)[1:2] == [NO_NAME]


@dataclass(frozen=True, eq=False)
class Request:
    """One rank's part of one operation.

    `name` is unique among a rank's operations in flight. `tensor` is contiguous, of any shape; None for a
    barrier and a join. An allreduce with `in_place` leaves its result in `tensor`, as a broadcast does.
    """

    name: str
    kind: Kind
    tensor: torch.Tensor | None = None
    in_place: bool = False
    reduction: Reduction = "sum"
    prescale: float = 1.0
    """Before the sum, rounded to the tensor's type."""
    postscale: float = 1.0
    """After it."""
    root: int = 0
    """World rank; for a broadcast."""
    splits: tuple[int, ...] | None = None
    """Rows for each member; for an alltoall. None: equal parts."""
    process_set: int = EVERYBODY
    codec: str = NONE
    """How an allreduce of floats travels, in the spelling of a plan; "none": exactly; "auto": as is best."""
    chosen_with: str = ""
    """With codec "auto": the name of an exchange, whose operations have their codecs chosen together."""


class Travel(NamedTuple):
    """How an operation travelled that has ended. One that travelled with others has what these had together."""

    begin_seconds: float
    """When its first message was given to the network."""
    end_seconds: float
    """When its result was there."""
    sent_bytes: int
    """By this rank, for this operation alone."""
    wait_seconds: float = 0.0
    """Between begin and end: waiting for messages of other ranks. 0 where it travelled with its announcement."""
    codec_seconds: float = 0.0
    """Between begin and end: encoding, decoding and adding. 0 as before."""
    rounds: int = 1
    """Messages that were waited for one after the other."""
    codec: str = ""
    """By which it travelled; empty where it travelled with its announcement."""


class Ticket(Protocol):
    """One submitted operation."""

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: now, when it is done, else from the thread that finishes the operation.

        That thread may hold the engine's lock and serves all other operations: `callback` must not wait, and must
        not raise.
        """

    def travel(self) -> Travel:
        """Return how it travelled, once it is done: for records."""

    def wait(self) -> Any:
        """Return the result, once it is there.

        A tensor; for an alltoall a tensor and the rows received from each member (int32); for a join the last
        rank that joined; for a barrier None. Raises `Mismatch` when the members asked for different things,
        `PeerLost` when one of them is gone, `Stalled` when one did not come, `CommError` for the rest.
        """


class JoinTicket(Ticket, Protocol):
    """One rank's join. `wait` returns the last rank that joined."""

    def is_last(self) -> bool:
        """Return whether all other ranks joined before this one.

        Waits for rank 0, not for ranks that have not joined. Raises what `wait` raises.
        """


class OperationLog(Protocol):
    """Who wants to know what happens to named operations. Called from the negotiation thread; must not wait.

    All times are `time.monotonic()` in seconds. `activity` is one of QUEUE, WAIT_FOR_DATA,
    MEMCPY_IN_FUSION_BUFFER, MEMCPY_OUT_FUSION_BUFFER, ALLOCATE_OUTPUT or the backend's operation, for example
    TCP_ALLREDUCE and GLOO_ALLREDUCE.
    """

    @property
    def is_on(self) -> bool:
        """Whether events are wanted. It may change at any time; none are sent while it is False."""
        return True

    def submitted(self, name: str, kind: Kind, at_seconds: float) -> None:
        """This rank asked for the operation: its negotiation begins."""

    def rank_ready(self, name: str, rank: int, at_seconds: float) -> None:
        """That rank was seen to be ready (only where the negotiation shows it)."""

    def begun(self, name: str, kind: Kind, at_seconds: float) -> None:
        """All ranks are ready: the negotiation has ended and the operation begins."""

    def activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """One phase of the operations that travel together."""

    def finished(self, name: str, dtype: str, shape: Sequence[int], at_seconds: float, error: str = "") -> None:
        """The operation has ended."""


class NullOperationLog(OperationLog):
    """Ignores all events."""

    @property
    def is_on(self) -> bool:
        """See `OperationLog`."""
        return False

    def submitted(self, name: str, kind: Kind, at_seconds: float) -> None:
        """See `OperationLog`."""

    def rank_ready(self, name: str, rank: int, at_seconds: float) -> None:
        """See `OperationLog`."""

    def begun(self, name: str, kind: Kind, at_seconds: float) -> None:
        """See `OperationLog`."""

    def activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """See `OperationLog`."""

    def finished(self, name: str, dtype: str, shape: Sequence[int], at_seconds: float, error: str = "") -> None:
        """See `OperationLog`."""


@dataclass(frozen=True)
class NamedOpsSettings:
    """How the engine behaves; the same on all ranks."""

    fusion_bytes: int = 128 * 2**20
    """Small tensors travel together up to this many bytes."""
    cache_capacity: int = 1024
    """Names whose operation is remembered, so that a repeated one needs no negotiation."""
    stall_warning_seconds: float = 60.0
    """0: never report."""
    stall_shutdown_seconds: float = 0.0
    """0: never give up. Not before the warning, so that the end has a reason."""
    by_host: bool = True
    """Whether large sums meet inside each host first, where several have several ranks."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a shutdown that would come before the warning."""
        if 0 < self.stall_shutdown_seconds < self.stall_warning_seconds:
            raise ConfigError(
                f"stall_shutdown_seconds={self.stall_shutdown_seconds:g} is below "
                f"stall_warning_seconds={self.stall_warning_seconds:g}",
                remedy="the job would end before the stall is reported; make the second one smaller",
            )


# Short numbers for what a rank asks for again and again.


@dataclass(eq=False, slots=True)
class CacheEntry:
    """A signature that this rank has used."""

    number: int
    signature: Signature
    small: bool
    """The data travels along."""
    is_told: bool = False
    """The peers know the number."""
    agreed: tuple[Signature, ...] = ()
    """What the members said when they last agreed: saying the same they agree again."""
    key: tuple[int, str] = field(init=False)
    """The signature's."""

    def __post_init__(self) -> None:
        self.key = self.signature.key


class ResponseCache:
    """This rank's numbers."""

    def __init__(self, capacity: int) -> None:
        self._capacity = min(max(1, capacity), NUMBER_MASK)
        self._known: OrderedDict[Hashable, CacheEntry] = OrderedDict()

    def find(self, about: Hashable) -> CacheEntry | None:
        """Return what was made for `about`, if it is still known."""
        known = self._known.get(about)
        if known is not None:
            self._known.move_to_end(about)
        return known

    def make(self, about: Hashable, signature: Signature, *, small: bool) -> CacheEntry:
        """Return a number for a signature; the least recently used one, if there are no more."""
        known = self.find(about)
        if known is not None:
            return known
        number = len(self._known)
        if number >= self._capacity:
            _, oldest = self._known.popitem(last=False)
            number = oldest.number
        known = self._known[about] = CacheEntry(number, signature, small)
        return known


def cache_key(request: Request, serial: int, group: tuple[str, ...]) -> Hashable:
    """Return what tells requests apart whose signatures differ, without the work of making them."""
    tensor = request.tensor
    if tensor is None:
        return (request.name, request.kind, serial, group)
    return (
        request.name, request.kind, serial, tensor.dtype, tensor.shape, tensor.device.type, request.reduction,
        request.prescale, request.postscale, request.root, request.splits, request.codec, group,
        request.chosen_with,
    )  # fmt: skip


# One rank's operation from submission to result, and the ticket its submitter holds.

_making_gates = threading.Lock()


class TicketDriver(Protocol):
    """Who can bring an operation to its end in the thread that waits for it."""

    def drive(self, ticket: PendingTicket) -> None:
        """Return when the operation is done, or another thread will finish it; also called when it is done."""

    def nobody_waits(self) -> None:
        """An operation is to go on by itself."""


class PendingTicket:
    """A `request.Ticket`. `before_wait` is called before a thread goes to sleep for it.

    Without a `driver` a waiting thread sleeps until another one finishes the operation.
    """

    __slots__ = (
        "_before_wait", "_callbacks", "_carrier", "_codec", "_done", "_driver", "_error", "_gate", "_is_kept",
        "_on_finish", "_travel", "_value", "waits_since_seconds",
    )  # fmt: skip

    def __init__(self, before_wait: Callable[[], None], driver: TicketDriver | None = None) -> None:
        self._before_wait = before_wait
        self._driver = driver
        self._on_finish: Callable[[PendingTicket], None] | None = None
        self._done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._gate: threading.Lock | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._carrier: tuple[BucketWork, float] | None = None
        """What carries the operation, and which share of that it is; until it is done, as it holds tensors."""
        self._codec = ""
        self._is_kept = False
        """Whether the result is kept for the stream of who waits."""
        self._travel = Travel(0.0, 0.0, 0)
        self.waits_since_seconds: float | None = None
        """When a thread first began to wait for it; None: none did."""

    def done(self) -> bool:
        """See `request.Ticket`."""
        driver = self._driver
        if driver is not None and not self._done:
            driver.nobody_waits()
        return self._done

    @property
    def is_done(self) -> bool:
        """Whether it is done, for who brings it to its end."""
        return self._done

    def wait(self) -> Any:
        """See `request.Ticket`. May be called by several threads, and again."""
        self._before_wait()  # also when it is done: others may wait for what this rank has not sent yet
        if not self._done and self.waits_since_seconds is None:
            self.waits_since_seconds = time.monotonic()
        driver = self._driver
        if driver is not None:
            driver.drive(self)
        if not self._done:
            self._sleep()
        if self._error is not None:
            raise copy.copy(self._error)  # each caller's own, so that tracebacks do not grow
        if self._is_kept:
            for each in self._value if isinstance(self._value, tuple) else (self._value,):
                streams = streams_of(each.device)
                if streams is not None:
                    streams.keep(each)
        return self._value

    def keep_result(self) -> None:
        """The result is made on a stream of its own: see [Note: done on the device] in `group_thread`."""
        self._is_kept = True

    def carried_by(self, work: BucketWork, share: float, codec: str) -> None:
        """Note what carries the operation, which share of that it is, and by which codec."""
        self._carrier, self._codec = (work, share), codec

    def sent_at_once(self, at_seconds: float, sent_bytes: int) -> None:
        """Note that the operation's data travelled with its announcement."""
        self._travel = Travel(at_seconds, at_seconds, sent_bytes)

    def travel(self) -> Travel:
        """See `request.Ticket`."""
        return self._travel

    def _arrive(self, end_seconds: float) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is None:
            self._travel = self._travel._replace(end_seconds=end_seconds)
            return
        work, share = carrier
        self._travel = Travel(
            work.begin_seconds or end_seconds,
            end_seconds,
            round(share * work.sent_bytes),
            work.wait_seconds,
            work.codec_seconds,
            max(1, work.rounds),
            self._codec,
        )

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """See `request.Ticket`."""
        self._callbacks.append(callback)
        driver, self._driver = self._driver, None  # who waits when the callback was called does not wait
        if self._done:
            self._call_all()
        elif driver is not None:
            driver.nobody_waits()

    def call_on_finish(self, wake: Callable[[PendingTicket], None]) -> None:
        """Call `wake` when the operation is done. For the driver, with the engine's lock held."""
        self._on_finish = wake

    def finish(self, value: Any, error: Exception | None = None) -> None:
        """Wake all waiting threads; a second call is ignored."""
        if self._done:
            return
        self._value, self._error = value, error
        self._arrive(time.monotonic())
        self._done = True
        if self._gate is not None:
            self._gate.release()
        if self._on_finish is not None:
            self._on_finish(self)
        self._call_all()

    def _call_all(self) -> None:
        # Called by who finishes, and by who asks after that. `pop` gives each callback to one of them.
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback()

    def _sleep(self) -> None:
        with _making_gates:
            if self._gate is None:
                gate = threading.Lock()
                gate.acquire()
                self._gate = gate
        # `finish` sets `_done` first and looks for a gate then; here it is the other way round. So either the gate
        # is opened, or it is known here that it will not be.
        if not self._done:
            self._gate.acquire()
            self._gate.release()


@dataclass(eq=False, slots=True)
class Operation:
    """What this rank submitted."""

    request: Request
    known: CacheEntry
    tensor: torch.Tensor | None
    """The request's, without its history."""
    members: tuple[int, ...]
    """World ranks, ascending."""
    ticket: PendingTicket
    submitted_seconds: float
    group: Group | None = None
    told: dict[int, Signature] = field(default_factory=dict)
    """What each present member said, by rank ascending; once all are ready."""
    absent: tuple[int, ...] = ()
    payloads: list[bytearray | None] = field(default_factory=list)
    """What each present member sent along, while it is not used yet."""
    ready_event: Any = None
    """On a GPU: the tensor is written when this has happened."""

    @property
    def signature(self) -> Signature:
        """What this rank asks for."""
        return self.known.signature

    @property
    def size(self) -> int:
        """Members, absent ones too."""
        return len(self.members)

    @property
    def present(self) -> tuple[int, ...]:
        """Members that take part."""
        return tuple(self.told)


@dataclass(eq=False, slots=True)
class Group:
    """Operations that run together, or none of them."""

    operations: list[Operation]
    not_ready: int
    failed: bool = False

"""What a rank asks for by name, and what it gets: the vocabulary of the negotiation engine.

Ranks submit named operations in any order and from any thread. An operation runs once every member of its
process set has submitted it; what they ask for must agree, or it fails on all of them with the same error
and everything else goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ....core.vocabulary.codec_spec import NONE
from ....core.vocabulary.errors import ConfigError

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

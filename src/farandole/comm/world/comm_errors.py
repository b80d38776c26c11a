"""Failures of the backend and of the store, as errors of ours.

[Note: one translation] Every call of torch's store and of its groups is made inside `translated`. A rank that is
gone shows up at whichever call comes next, and a job that goes on after a failure (an elastic one, or a user's own
loop) decides by the kind of error. A style test finds the calls that are outside.

[Note: a refusal of some] A proof may fail on some ranks, while the others wait for them in a later exchange and
would only see that they are gone. So those that refuse leave the refusal in the store and, if the others do not
come to one of their own soon, shut all connections but the store's: who waits then finds it, and raises the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from ...core.failures import first_line, is_peer_lost, is_timeout, waited_seconds
from ...core.vocabulary.errors import CommError, PeerLost, PlanError, Stalled
from .forks import SocketAborter

_ENDED = "this generation of ranks has ended: one of them is gone"


class Member(Protocol):
    """What errors say of a `World`."""

    @property
    def job_rank(self) -> int:
        """See `World`."""

    @property
    def size(self) -> int:
        """See `World`."""

    @property
    def timeout_seconds(self) -> float:
        """See `World`."""

    @property
    def in_forked_child(self) -> bool:
        """See `World`."""

    @property
    def sockets(self) -> SocketAborter:
        """See `World`."""

    def find_refusal(self) -> PlanError | None:
        """See `World`."""


@contextmanager
def translated(world: Member, operation: str, *, bucket: int | None = None) -> Iterator[None]:
    """Raise what the store or a group raises as a `CommError`. See [Note: one translation].

    Nothing is asked any more once the world's sockets are shut on purpose: that is a `PeerLost` at once.
    """
    refuse_if_ended(world, operation, bucket=bucket)
    try:
        yield
    except RuntimeError as problem:
        raise translate_error(problem, world, operation, bucket=bucket) from None


def refuse_if_ended(world: Member, operation: str, *, bucket: int | None = None) -> None:
    """Raise `PeerLost` when the sockets of the world were shut on purpose, `CommError` in a forked child."""
    if world.in_forked_child and world.size > 1:
        raise CommError(
            "this process was forked from that rank, and is no rank itself",
            rank=world.job_rank,
            operation=operation,
            bucket=bucket,
            remedy="ask the other ranks in the process that called farandole.init()",
        )
    if world.sockets.shut_down:
        raise translate_error(RuntimeError(_ENDED), world, operation, bucket=bucket)


def translate_error(
    problem: RuntimeError, world: Member, operation: str, *, bucket: int | None = None
) -> CommError | PlanError:
    """Turn a failure of the backend into ours: which ranks are gone or late, as far as it knows, or a refusal."""
    kind: type[CommError] = PeerLost
    text, remedy = str(problem), "look for the first failure among the other ranks"
    if world.sockets.shut_down:
        what = _ENDED
    elif is_timeout(text):
        kind, what = Stalled, f"no answer within {waited_seconds(text) or world.timeout_seconds:g} s"
        remedy = "another rank is stuck, or did not make this call"
    elif isinstance(problem, dist.DistNetworkError):
        what = f"the store, which rank 0 serves, is gone: {first_line(problem)}"
        remedy = "look for the first failure of rank 0"
    elif is_peer_lost(text):
        what = "another rank closed its connection"
    else:
        kind, what, remedy = CommError, first_line(problem), ""
    # After a time-out the store may not answer either, and has no time-out of its own for this question.
    refusal = world.find_refusal() if kind is PeerLost and not world.sockets.shut_down else None
    return refusal or kind(what, rank=world.job_rank, operation=operation, bucket=bucket, remedy=remedy)

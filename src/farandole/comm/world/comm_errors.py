"""The back end and the store as we use them: their failures are told in our words.

[Note: one translation] Whoever asks torch's store or one of its groups for something does so inside `translated`:
a rank that is gone shows up at whichever call comes next, and who goes on after a failure (an elastic job, a loop
of the user's own) goes by the kind of error. A style test finds the calls that are outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from ...core.vocabulary.backend_texts import first_line, is_peer_lost, is_timeout, waited_seconds
from ...core.vocabulary.errors import CommError, PeerLost, Stalled
from .socket_abort import SocketAborter


class Member(Protocol):
    """What errors say of a `World`."""

    @property
    def rank(self) -> int:
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
            rank=world.rank,
            operation=operation,
            bucket=bucket,
            remedy="ask the other ranks in the process that called farandole.init()",
        )
    if world.sockets.shut_down:
        raise _ended(world, operation, bucket)


def translate_error(
    problem: RuntimeError, world: Member, operation: str, *, bucket: int | None = None
) -> CommError:
    """Turn a back end's failure into ours: who is gone or late, as far as the back end knows."""
    text = str(problem)
    reason = first_line(problem)
    if world.sockets.shut_down:
        return _ended(world, operation, bucket)
    if is_timeout(text):
        return Stalled(
            f"no answer within {waited_seconds(text) or world.timeout_seconds:g} s",
            rank=world.rank,
            operation=operation,
            bucket=bucket,
            remedy="another rank is stuck, or did not make this call",
        )
    if isinstance(problem, dist.DistNetworkError):
        return PeerLost(
            f"the store, which rank 0 serves, is gone: {reason}",
            rank=world.rank,
            operation=operation,
            bucket=bucket,
            remedy="look for the first failure of rank 0",
        )
    if is_peer_lost(text):
        return PeerLost(
            "another rank closed its connection",
            rank=world.rank,
            operation=operation,
            bucket=bucket,
            remedy="look for the first failure among the other ranks",
        )
    return CommError(reason, rank=world.rank, operation=operation, bucket=bucket)


def _ended(world: Member, operation: str, bucket: int | None) -> PeerLost:
    return PeerLost(
        "this generation of ranks has ended: one of them is gone",
        rank=world.rank,
        operation=operation,
        bucket=bucket,
        remedy="look for the first failure among the other ranks",
    )

"""The back end and the store as we use them: their failures are told in our words.

[Note: one translation] Whoever asks torch's store or one of its groups for something does so inside `translated`:
a rank that is gone shows up at whichever call comes next, and who goes on after a failure (an elastic job, a loop
of the user's own) goes by the kind of error. A style test finds the calls that are outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import CommError, PeerLost, Stalled

if TYPE_CHECKING:
    from .world import World

_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Read error",
    "Write error",
    "Connection refused",
    "Connection was likely closed",
    "failed to recv, got 0 bytes",
    "Socket closed",
)
_STALLED = ("timed out", "timeout", "Timed out", "Timeout")
_MILLISECONDS = re.compile(r"(?:[Tt]imed out waiting|[Tt]imeout after|[Tt]imed out after) (\d+) ?ms")


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum `tensor` over the group, in place; the tensor must not be touched until `wait`."""
    work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    return work


@contextmanager
def translated(world: World, operation: str, *, bucket: int | None = None) -> Iterator[None]:
    """Raise what the store or a group raises as a `CommError`. See [Note: one translation].

    Nothing is asked any more once the world's sockets are shut on purpose: that is a `PeerLost` at once.
    """
    refuse_if_ended(world, operation, bucket=bucket)
    try:
        yield
    except RuntimeError as problem:
        raise translate_error(problem, world, operation, bucket=bucket) from None


def refuse_if_ended(world: World, operation: str, *, bucket: int | None = None) -> None:
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
    problem: RuntimeError, world: World, operation: str, *, bucket: int | None = None
) -> CommError:
    """Turn a back end's failure into ours: who is gone or late, as far as the back end knows."""
    text = str(problem)
    reason = text.strip().splitlines()[0] if text.strip() else type(problem).__name__
    if world.sockets.shut_down:
        return _ended(world, operation, bucket)
    if any(sign in text for sign in _STALLED):
        return Stalled(
            f"no answer within {_waited_seconds(text, world):g} s",
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
    if any(sign in text for sign in _LOST):
        return PeerLost(
            "another rank closed its connection",
            rank=world.rank,
            operation=operation,
            bucket=bucket,
            remedy="look for the first failure among the other ranks",
        )
    return CommError(reason, rank=world.rank, operation=operation, bucket=bucket)


def _ended(world: World, operation: str, bucket: int | None) -> PeerLost:
    return PeerLost(
        "this generation of ranks has ended: one of them is gone",
        rank=world.rank,
        operation=operation,
        bucket=bucket,
        remedy="look for the first failure among the other ranks",
    )


def _waited_seconds(text: str, world: World) -> float:
    """Return how long the back end says it waited; the world's time-out when it does not say."""
    found = _MILLISECONDS.search(text)
    return float(found[1]) / 1000 if found is not None else world.timeout_seconds

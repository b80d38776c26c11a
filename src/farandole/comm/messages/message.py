"""What generators of this package yield: one message a round, by a collective operation.

[Note: who may write when] A message may still be on its way when its result is there. In an exchange of two rounds
no rank has the result before all have received this rank's part. In one round a rank may have received everything
while its own part still waits for a slow link, and its caller then overwrites the tensor: so a copy is sent.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

Operation = Literal["all_reduce", "all_gather", "all_to_all", "gather", "broadcast", "sendrecv"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True)
class GroupRank:
    """This rank's number in the group that exchanges, and the size of that group."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Message:
    """One round. All ranks of the group yield the same operation with the same shape and dtype.

    - ``all_reduce``: any shape, floating; received: the sum over the ranks, the same bits on all of them.
    - ``all_gather``: any shape; received: (size, *shape), row r from rank r.
    - ``all_to_all``: (size, ...), row r for rank r; received: (size, ...), row r from rank r.
    - ``gather``: any shape; received by rank 0: as by ``all_gather``; by the others: (0, *shape), nothing.
    - ``broadcast``: any shape, the values of rank 0 count; received: (1, *shape), rank 0's.
    - ``sendrecv``: any shape; received: (1, *shape), that of `peer`, which names this rank as its own peer. A rank
      that is its own peer receives unspecified values.
    """

    tensor: torch.Tensor
    operation: Operation
    peer: int | None = None
    """Rank in the group, for ``sendrecv``."""


class Encoded(NamedTuple):
    """What a codec returns. See [Note: conservation] in `codecs.codec`."""

    mean: torch.Tensor
    """Over the ranks, with the same bits on all of them."""
    own: torch.Tensor
    """This rank's contribution to `mean`, in units of its own gradient."""
    state: Any = None
    """For the next gradient."""


class Exchanged(NamedTuple):
    """What is known when the mean lies where the gradient was."""

    is_finite: bool | torch.Tensor
    """Whether the mean holds no NaN and no infinity; True for an exact one, which is not checked. For a tensor on
    a device a tensor there, () of bool."""
    state: Any
    """For the next gradient."""


Encoding = Generator[Message, torch.Tensor, Encoded]
Exchange = Generator[Message, torch.Tensor, Exchanged]
Reduction = Generator[Message, torch.Tensor, torch.Tensor]
"""Returns the sum over the ranks."""


def check(message: Message, group: GroupRank) -> None:
    """Raise `ValueError` for a message that cannot be sent."""
    if message.operation not in OPERATIONS:
        expected = ", ".join(OPERATIONS)
        raise ValueError(f"unknown operation {message.operation!r}, expected one of {expected}")
    if message.operation == "all_to_all" and (message.tensor.dim() == 0 or message.tensor.shape[0] != group.size):
        raise ValueError(
            f"all_to_all of shape {tuple(message.tensor.shape)}: expected {group.size} rows, one for each rank"
        )
    if message.operation == "sendrecv" and not (message.peer is not None and 0 <= message.peer < group.size):
        raise ValueError(f"sendrecv with {message.peer}: expected a peer of 0 to {group.size - 1}")
    if message.operation == "all_reduce" and not message.tensor.is_floating_point():
        raise ValueError(f"all_reduce of {message.tensor.dtype}: expected a floating-point tensor")


def received_shape(message: Message, group: GroupRank) -> tuple[int, ...]:
    """Return the shape of what comes back for `message`."""
    shape = tuple(message.tensor.shape)
    rows = {"all_gather": group.size, "gather": 0 if group.rank else group.size, "broadcast": 1, "sendrecv": 1}
    return (rows[message.operation], *shape) if message.operation in rows else shape


def sources_and_targets(message: Message, group: GroupRank) -> tuple[list[int], list[int]]:
    """Return the ranks of the group whose part of `message` this one receives, and those it sends to.

    Each rank begins with another neighbour, so that the first messages go over different links.
    """
    sources = [(group.rank - step) % group.size for step in range(1, group.size)]
    targets = [(group.rank + step) % group.size for step in range(1, group.size)]
    if message.peer is not None:
        others = [message.peer] if message.peer != group.rank else []
        return others, others
    if message.operation == "gather":
        return ([], [0]) if group.rank else (sources, [])
    if message.operation == "broadcast":
        return ([0], []) if group.rank else ([], targets)
    return sources, targets

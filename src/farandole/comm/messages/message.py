"""The contract between codecs and whatever drives them.

[Note: conservation] A codec returns ``(mean, own)``. `own` is what this rank contributed, in units of its
own gradient: the mean of `own` over the ranks is `mean`, to float rounding, whatever was rounded on the
way. So ``asked - own`` is all that was lost, and `feedback.error_feedback` can keep it for the next step,
for every codec alike. Where a rank rounds the *sum* of a piece (the second half of a reduce-scatter +
all-gather), that error is `size` times its own.

[Note: who may write when] What is on its way may still be read when the result is there. In two rounds nobody
has the result before all have this rank's part. In one round a rank may have everybody's while its own still
waits for a slow link, and its caller then writes the result in its place: so a copy travels.

The smallest codec, sending half the bits::

    def half(grad, state, seat):
        packed = grad.to(torch.bfloat16)
        everyone = yield Message(packed, "gather")
        return everyone.float().mean(0), packed.float()
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch

from .reduce_rules import accumulates_in_fp32

Operation = Literal["sum", "gather", "exchange", "collect", "spread", "swap"]


@dataclass(frozen=True)
class GroupRank:
    """Who is encoding: this rank among those that exchange."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Message:
    """One round. All ranks yield the same operation on the same shape and dtype.

    - ``sum``: any shape, floating; received: the sum over the ranks, the same bits on all of them.
    - ``gather``: any shape; received: (size, *shape), row r from rank r.
    - ``exchange``: (size, ...), row r for rank r; received: (size, ...), row r from rank r.
    - ``collect``: any shape; received by rank 0: as ``gather``; by the others: (0, *shape), nothing.
    - ``spread``: any shape, whose values matter on rank 0 alone; received: (1, *shape), rank 0's.
    - ``swap``: any shape; received: (1, *shape), that of `peer`, which names this rank as its own. A rank that is
      its own peer receives nothing of use.
    """

    tensor: torch.Tensor
    operation: Operation
    peer: int | None = None
    """Of a swap: a place among those that exchange."""


State = dict[str, Any]
"""What a codec keeps between steps: tensors and numbers by name. Saved with the run."""
Encoding = Generator[Message, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
Exchange = Generator[Message, torch.Tensor, bool]
"""As an `Encoding`, but the mean is left where the gradient was; returned is whether it is finite."""


class Codec(Protocol):
    """A function of a gradient, its state and the seat. `grad` is float32.

    What `make_codec` returns may overwrite `grad`. The codecs inside of it leave theirs alone, because error
    feedback still needs it; a person's own codec gets a copy.

    Flat codecs get 1-D segments of a bucket; matrix codecs (``unit = "matrix"`` in the catalogue) get the
    2-D gradient of one parameter.
    """

    def __call__(self, grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        """Begin to encode `grad`."""


def check(message: Message, seat: GroupRank) -> None:
    """Raise `ValueError` for a message that no driver can carry."""
    if message.operation not in get_args(Operation):
        expected = ", ".join(get_args(Operation))
        raise ValueError(f"unknown operation {message.operation!r}, expected one of {expected}")
    if message.operation == "exchange" and (message.tensor.dim() == 0 or message.tensor.shape[0] != seat.size):
        raise ValueError(
            f"exchange of shape {tuple(message.tensor.shape)}: expected {seat.size} rows, one for each rank"
        )
    if message.operation == "swap" and not (message.peer is not None and 0 <= message.peer < seat.size):
        raise ValueError(f"swap with {message.peer}: expected a peer of 0 to {seat.size - 1}")
    if message.operation == "sum" and not message.tensor.is_floating_point():
        raise ValueError(f"sum of {message.tensor.dtype}: expected a floating-point tensor")


def received_shape(message: Message, seat: GroupRank) -> tuple[int, ...]:
    """Return the shape of what comes back for `message`."""
    shape = tuple(message.tensor.shape)
    rows = {"gather": seat.size, "collect": 0 if seat.rank else seat.size, "spread": 1, "swap": 1}
    return (rows[message.operation], *shape) if message.operation in rows else shape


def sources_and_targets(message: Message, seat: GroupRank) -> tuple[list[int], list[int]]:
    """Return the places whose part of `message` this one receives, and those it sends to.

    Each begins with another neighbour, so that no link is everybody's first.
    """
    sources = [(seat.rank - step) % seat.size for step in range(1, seat.size)]
    targets = [(seat.rank + step) % seat.size for step in range(1, seat.size)]
    if message.peer is not None:
        others = [message.peer] if message.peer != seat.rank else []
        return others, others
    if message.operation == "collect":
        return ([], [0]) if seat.rank else (sources, [])
    if message.operation == "spread":
        return ([0], []) if seat.rank else ([], targets)
    return sources, targets


def sum_by_parts(tensor: torch.Tensor, seat: GroupRank, divisor: int = 1) -> Encoding:
    """Sum over the ranks with exchange and gather alone: reduce-scatter + all-gather, in rank order.

    Every element is added up by one rank, so all end with the same bits. Small tensors go in one round:
    everybody gathers all and adds. Sends 2 (N-1)/N S bytes, or (N-1) S when small.
    Returned is the sum over `divisor`.

    See [Note: who may write when].
    """
    count = tensor.numel()
    if count * tensor.element_size() * seat.size <= ONE_ROUND_BYTES:
        everyone = yield Message(tensor.clone(), "gather")
        total = add_rows(everyone, divisor)
    else:
        piece = -(-count // seat.size)
        padded = tensor.reshape(-1)
        if piece * seat.size != count:
            padded = torch.cat([padded, padded.new_zeros(piece * seat.size - count)])
        mine = add_rows((yield Message(padded.view(seat.size, piece), "exchange")), divisor)
        total = (yield Message(mine, "gather")).reshape(-1)[:count]
    total = total.view(tensor.shape)
    return total, total


def exact(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
    """The codec ``none``: the mean, without loss. Any floating dtype."""
    if accumulates_in_fp32(grad.dtype):  # rounded once, after the division
        mean, _ = yield from sum_by_parts(grad, seat, seat.size)
        return mean, grad
    total = yield Message(grad, "sum")
    return total / seat.size, grad


def one_server(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
    """The mean, without loss, by way of one server: rank 0 receives everything and sends the mean back.

    Its link carries (N-1) S bytes each way, everybody else's S. For comparison: `exact` is better balanced.
    """
    rows = yield Message(grad, "collect")
    mean = grad if seat.rank else add_rows(rows, seat.size)
    everyone = yield Message(mean, "spread")
    return everyone[0], grad


ONE_ROUND_BYTES = 16 * 1024
"""Up to this many bytes in all, a sum is one round of everybody to everybody: latency rules."""


def add_rows(rows: torch.Tensor, divisor: int = 1) -> torch.Tensor:
    """Return the sum of `rows` over the first dimension, added in order, over `divisor`.

    Floats of 16 bits and less are added up and divided in float32, and rounded once.
    """
    total = rows[0].float() if accumulates_in_fp32(rows.dtype) else rows[0].clone()
    for row in rows[1:]:
        total += row
    if divisor != 1:
        total /= divisor
    return total.to(rows.dtype)

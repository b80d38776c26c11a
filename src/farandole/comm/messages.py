"""What codecs send: messages, sums made of messages, and a simulator without a wire.

[Note: who may write when] A message may still be on its way when its result is there. In an exchange of two rounds
no rank has the result before all have received this rank's part. In one round a rank may have received everything
while its own part still waits for a slow link, and its caller then overwrites the tensor: so a copy is sent.

[Note: the same bits] After round k the ranks whose numbers agree in all bits above k hold the same bits.
Before the first round that is true of each rank alone. In round k two such groups meet, member by member; all
of one hold a, all of the other hold b, and each computes a + b with the lower group's first. So both groups
hold the same bits then, and after the last round all ranks do. Which numbers are added in which order depends
on the number of ranks alone.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
2005.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch

# The elements of a user's tensor side by side, and their bytes, however it lies in memory.


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements, (elements,) with stride 1: a view where that is possible.

    A column of a row, or ``x[::2]`` of two elements, has one element and a stride of more than 1. Torch calls it
    contiguous, and refuses to view it as bytes.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat if flat.stride() == (1,) else flat.as_strided(flat.shape, (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bytes in their order, (bytes,) of uint8: a view where that is possible."""
    return side_by_side(tensor).view(torch.uint8)


_WORD_BYTES = 8


def bit_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the bits of each tensor, taken as whole numbers of 64 bits: (tensors,) of int64.

    On the device of all of them, or the CPU. A bit that flips always changes the sum. On the CPU it takes as long
    as to read the elements.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    sums = []
    for tensor in tensors:
        is_plain = tensor.is_contiguous() and not tensor.is_complex()
        flat = tensor.detach().view(-1).view(torch.uint8) if is_plain else bytes_of(tensor)
        if flat.storage_offset() % _WORD_BYTES:
            flat = flat.clone()
        whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
        total = flat[:whole].view(torch.int64).sum()
        sums.append(total if whole == flat.numel() else total + flat[whole:].long().sum())
    is_together = len({each.device for each in sums}) == 1
    return torch.stack(sums if is_together else [each.cpu() for each in sums])


# What generators of this package yield: one message a round, by a collective operation.

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


# How tensors add up over ranks: in which precision, and what is rounded when.


@cache
def accumulates_in_fp32(dtype: torch.dtype) -> bool:
    """Return whether this is a float that is added up in float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def sum_into(out: torch.Tensor, rows: Sequence[torch.Tensor], divisor: int) -> None:
    """Write the sum of `rows`, two at least, over `divisor` into `out`, which may be the first of them.

    The mean of whole numbers is rounded toward zero, as NCCL does.
    """
    if accumulates_in_fp32(out.dtype):
        total = rows[0].float()
        for row in rows[1:]:
            total += row.float()  # torch adds no float8 to a float32
        divide(total, divisor)
        out.copy_(total)
        return
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out.add_(row)
    if divisor != 1:
        divide(out, divisor)


def divide(total: torch.Tensor, divisor: int) -> None:
    """Make a sum a mean, with the CPU's bits; see `sum_into`."""
    if not (total.dtype.is_floating_point or total.dtype.is_complex):
        total.div_(divisor, rounding_mode="trunc")
    elif total.is_cpu:
        total.div_(divisor)
    else:  # by a number CUDA multiplies by its reciprocal, which is not its quotient in the last bit
        total.div_(torch.full((), divisor, dtype=total.dtype, device=total.device))


# Sums over the ranks, made of messages that every transport can carry.
#
# Two algorithms: reduce-scatter and all-gather, for large tensors, and recursive doubling, for many ranks and
# small tensors. Both give the same bits on all ranks.
#
# Recursive doubling: in round k each rank exchanges its partial sum with the rank whose number differs in bit k,
# and both add. For P ranks, a power of two, that is log2 P messages a rank, where an all-to-all is P - 1
# messages in one round. Other numbers of ranks fold: those beyond the power of two first hand their part to one
# below, and receive the sum at the end.

ONE_ROUND_BYTES = 16 * 1024
"""Up to this many bytes in all, each rank sends its whole tensor to all others in one round: latency dominates."""


def reduce_scatter_all_gather(tensor: torch.Tensor, group: GroupRank, divisor: int = 1) -> Reduction:
    """Return the sum over the ranks, over `divisor`, by ``all_to_all`` and ``all_gather``, in the order of ranks.

    Every element is added up by one rank, so all ranks end with the same bits. A rank sends 2 (N-1)/N S bytes.
    Small tensors are gathered in one round, and every rank adds them up: (N-1) S bytes.

    See [Note: who may write when] in `message`.
    """
    count = tensor.numel()
    if count * tensor.element_size() * group.size <= ONE_ROUND_BYTES:
        gathered = yield Message(tensor.clone(), "all_gather")
        total = add_rows(gathered, divisor)
    else:
        piece = -(-count // group.size)
        padded = tensor.reshape(-1)
        if piece * group.size != count:
            padded = torch.cat([padded, padded.new_zeros(piece * group.size - count)])
        local = add_rows((yield Message(padded.view(group.size, piece), "all_to_all")), divisor)
        total = (yield Message(local, "all_gather")).reshape(-1)[:count]
    return total.view(tensor.shape)


def recursive_doubling(tensor: torch.Tensor, group: GroupRank) -> Reduction:
    """Sum over the ranks. A rank sends its tensor once a round, in float32 when it has 16 bits or less."""
    power = 1 << (group.size.bit_length() - 1)
    total = tensor.float() if accumulates_in_fp32(tensor.dtype) else tensor.clone()
    beyond = group.rank >= power
    partner = group.rank - power if beyond else group.rank + power
    folds = partner < group.size
    if power < group.size:
        other = yield Message(total, "sendrecv", peer=partner if folds else group.rank)
        if folds and not beyond:
            total = total + other[0]
    step = 1
    while step < power:
        peer = group.rank if beyond else group.rank ^ step
        other = yield Message(total, "sendrecv", peer=peer)
        if not beyond:
            total = total + other[0] if peer > group.rank else other[0] + total
        step *= 2
    if power < group.size:
        other = yield Message(total, "sendrecv", peer=partner if folds else group.rank)
        if beyond:
            total = other[0]
    total = total.to(tensor.dtype)
    return total


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


# Runs the generators of N ranks in one process, in lock step.
#
# For tests, for counting bytes and for measuring codecs without a network. The semantics are those of the
# transport: `Message` describes them.

Rounds = Generator[Message, torch.Tensor, Any]


@dataclass(frozen=True)
class SimulationResult:
    """What all ranks ended with."""

    results: list[Any]
    """What the generators returned, by rank."""
    sent_bytes: list[int]
    """Bytes each rank sent, payload only."""
    rounds: int

    @property
    def means(self) -> list[torch.Tensor]:
        """The means, where the generators are codecs'."""
        return [result[0] for result in self.results]

    @property
    def owns(self) -> list[torch.Tensor]:
        """The ranks' own contributions, where the generators are codecs'."""
        return [result[1] for result in self.results]

    @property
    def states(self) -> list[Any]:
        """The states for the next step, where the generators are codecs'."""
        return [result[2] for result in self.results]


def simulate(generators: Sequence[Rounds]) -> SimulationResult:
    """Run one generator a rank to its end.

    Raises:
        ValueError: in some round the ranks do not yield the same operation, shape and dtype.
    """
    size = len(generators)
    sent = [0] * size
    rounds = 0
    ranks = [_Rank(generator) for generator in generators]
    received: list[torch.Tensor | None] = [None] * size
    while True:
        yielded = [rank.step(tensor) for rank, tensor in zip(ranks, received, strict=True)]
        messages = [message for message in yielded if message is not None]
        if not messages:
            break
        if len(messages) != size:
            raise ValueError(f"{size - len(messages)} of {size} ranks have finished, the others go on")
        rounds += 1
        received = list(_do_round(messages, sent))
    return SimulationResult([rank.result for rank in ranks], sent, rounds)


def as_encoding(exchange: Exchange, unit: torch.Tensor) -> Encoding:
    """Return `exchange`, which leaves the mean in `unit`, as an encoding, whose `own` is the mean too."""
    _, state = yield from exchange
    return Encoded(unit, unit, state)


class _Rank:
    """One generator, and its result once it has one."""

    def __init__(self, generator: Rounds) -> None:
        self._generator = generator
        self.result: Any = None

    def step(self, received: torch.Tensor | None) -> Message | None:
        try:
            return next(self._generator) if received is None else self._generator.send(received)
        except StopIteration as end:
            self.result = end.value
            return None


def _do_round(messages: Sequence[Message], sent: list[int]) -> Sequence[torch.Tensor]:
    """Return what each rank receives, and count the bytes that it sends."""
    size = len(messages)
    first = messages[0]
    for rank, message in enumerate(messages):
        check(message, GroupRank(rank, size))
        if (message.operation, message.tensor.shape, message.tensor.dtype) != (
            first.operation, first.tensor.shape, first.tensor.dtype
        ):  # fmt: skip
            raise ValueError(
                f"rank {rank} yields {message.operation} of {tuple(message.tensor.shape)} {message.tensor.dtype}, "
                f"rank 0 {first.operation} of {tuple(first.tensor.shape)} {first.tensor.dtype}"
            )
    if first.operation == "all_reduce":
        reduced = simulate(
            [
                reduce_scatter_all_gather(message.tensor, GroupRank(rank, size))
                for rank, message in enumerate(messages)
            ]
        )
        for rank, count in enumerate(reduced.sent_bytes):
            sent[rank] += count
        return reduced.results
    tensors = [message.tensor for message in messages]
    nbytes = first.tensor.numel() * first.tensor.element_size()
    part = nbytes // size if first.operation == "all_to_all" else nbytes
    for rank in range(size):
        sent[rank] += part * len(sources_and_targets(messages[rank], GroupRank(rank, size))[1])
    if first.operation == "sendrecv":
        peers = [message.peer or 0 for message in messages]
        if any(peers[peer] != rank for rank, peer in enumerate(peers)):
            raise ValueError(f"sendrecv between ranks that do not name each other: their peers are {peers}")
        return [tensors[peer][None].clone() for peer in peers]
    if first.operation == "broadcast":
        return [tensors[0][None].clone() for _ in range(size)]
    if first.operation == "gather":
        return [torch.stack(tensors), *(tensor[None][:0] for tensor in tensors[1:])]
    if first.operation == "all_gather":
        return [torch.stack(tensors) for _ in range(size)]
    return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(size)]

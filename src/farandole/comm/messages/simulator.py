"""Runs the generators of N ranks in one process, in lock step.

For tests, for counting bytes and for measuring codecs without a network. The semantics are those of the transport:
`Message` describes them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .all_reduce import reduce_scatter_all_gather
from .message import Encoded, Encoding, Exchange, GroupRank, Message, check, sources_and_targets

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

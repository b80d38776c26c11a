"""Pretend ranks: drive the generators of N ranks in one process, in lock step.

For tests, for the byte counter and for measuring codecs without a network. The semantics are those of
the wire: `Message` describes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .message import Encoding, Exchange, GroupRank, Message, check, sources_and_targets, sum_by_parts


@dataclass(frozen=True)
class SimulationResult:
    """What all ranks ended with."""

    means: list[torch.Tensor]
    owns: list[torch.Tensor]
    sent_bytes: list[int]
    """Bytes each rank sent, payload only."""
    rounds: int


def simulate(encodings: Sequence[Encoding]) -> SimulationResult:
    """Run one generator a rank to its end; raise `ValueError` when they do not say the same."""
    size = len(encodings)
    sent = [0] * size
    rounds = 0
    ranks = [_Rank(encoding) for encoding in encodings]
    answers: list[torch.Tensor | None] = [None] * size
    while True:
        said = [rank.step(answer) for rank, answer in zip(ranks, answers, strict=True)]
        messages = [message for message in said if message is not None]
        if not messages:
            break
        if len(messages) != size:
            raise ValueError(f"{size - len(messages)} of {size} ranks have finished, the others go on")
        rounds += 1
        answers = list(_carry(messages, sent))
    results = [rank.result for rank in ranks]
    return SimulationResult([mean for mean, _ in results], [own for _, own in results], sent, rounds)


def landing(exchange: Exchange, unit: torch.Tensor) -> Encoding:
    """Make what the engine runs for `unit` (`Made.exchange`) drivable; who asks for `own` gets the mean."""
    yield from exchange
    return unit, unit


class _Rank:
    """One generator, and its result once it has one."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self.result: tuple[torch.Tensor, torch.Tensor]

    def step(self, answer: torch.Tensor | None) -> Message | None:
        try:
            return next(self._encoding) if answer is None else self._encoding.send(answer)
        except StopIteration as end:
            self.result = end.value
            return None


def _carry(messages: Sequence[Message], sent: list[int]) -> Sequence[torch.Tensor]:
    """Do one round; return what each rank receives."""
    size = len(messages)
    first = messages[0]
    for rank, message in enumerate(messages):
        check(message, GroupRank(rank, size))
        if (message.operation, message.tensor.shape, message.tensor.dtype) != (
            first.operation, first.tensor.shape, first.tensor.dtype
        ):  # fmt: skip
            raise ValueError(
                f"rank {rank} says {message.operation} of {tuple(message.tensor.shape)} {message.tensor.dtype}, "
                f"rank 0 {first.operation} of {tuple(first.tensor.shape)} {first.tensor.dtype}"
            )
    if first.operation == "sum":
        together = simulate(
            [sum_by_parts(message.tensor, GroupRank(rank, size)) for rank, message in enumerate(messages)]
        )
        for rank, count in enumerate(together.sent_bytes):
            sent[rank] += count
        return together.means
    tensors = [message.tensor for message in messages]
    nbytes = first.tensor.numel() * first.tensor.element_size()
    part = nbytes // size if first.operation == "exchange" else nbytes
    for rank in range(size):
        sent[rank] += part * len(sources_and_targets(messages[rank], GroupRank(rank, size))[1])
    if first.operation == "swap":
        peers = [message.peer or 0 for message in messages]
        if any(peers[peer] != rank for rank, peer in enumerate(peers)):
            raise ValueError(f"swaps that do not meet: the ranks' peers are {peers}")
        return [tensors[peer][None].clone() for peer in peers]
    if first.operation == "spread":
        return [tensors[0][None].clone() for _ in range(size)]
    if first.operation == "collect":
        return [torch.stack(tensors), *(tensor[None][:0] for tensor in tensors[1:])]
    if first.operation == "gather":
        return [torch.stack(tensors) for _ in range(size)]
    return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(size)]

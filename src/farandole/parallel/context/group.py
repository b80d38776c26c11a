"""The ranks that share one sequence, and what they send each other. Every failure is a `CommError` of ours.

[Note: zigzag] With a causal mask the last tokens attend to all others and the first to themselves: equal runs of
tokens would be unequal work (Brandon et al. 2023, "Striped Attention", section 3). The sequence is cut into two
chunks a rank, and rank r of c holds chunk r and chunk 2c - 1 - r, in this order (Dubey et al. 2024, "The Llama 3
Herd of Models", section 3.3.2). Positions in a rank's part increase, so attention of a rank to itself is plain
causal attention. With another rank's part and a causal mask, all queries see the first half if that rank is
lower, and the second half of the queries sees everything if it is higher: half of the pairs either way.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...comm.messages import bytes_of
from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.text import name_ranks
from ..instrument.phase_hooks import inner_exchange

# What the ranks of a context group compare before they compute: the same whole samples, parts of one shape.

_MOST_ELEMENTS = 65536
_MOST_DIMENSIONS = 6


class Compared:
    """What one rank says of some tensors, and what all ranks of the group said."""

    def __init__(
        self, group: ContextGroup, operation: str, tensors: Sequence[torch.Tensor], extra: str = ""
    ) -> None:
        self._group, self._operation = group, operation
        first = list(tensors[0].shape[:_MOST_DIMENSIONS]) if tensors else []
        shapes = ";".join(f"{tuple(each.shape)} {each.dtype}" for each in tensors)
        padded = [*first, *[-1] * (_MOST_DIMENSIONS - len(first))]
        numbers = [zlib.crc32(f"{shapes} {extra}".encode()), _digest(tensors), *padded]
        self._said = group.gather_numbers(numbers, operation)

    def require_same_shapes(self, what: str) -> None:
        """Raise `Mismatch`, on all ranks of the group, where shapes differ."""
        if len({said[0] for said in self._said}) == 1:
            return
        shapes = [tuple(size for size in said[2:] if size >= 0) for said in self._said]
        texts = [f"of shape {shape}" for shape in shapes]
        if len(set(texts)) == 1:
            texts = [f"of kind {said[0]:08x}" for said in self._said]
        self._raise(f"{what} is {self._by_rank(texts)}", "give all ranks of a context group the same samples")

    def require_same_values(self, what: str) -> None:
        """Raise `Mismatch`, on all ranks of the group, where values differ."""
        if not self.are_values_same:
            texts = [f"sample {said[1]:08x}" for said in self._said]
            self._raise(
                f"{what} is not the same sample on all ranks ({self._by_rank(texts)})",
                "divide samples by fd.shard(loader), after fd.distribute; draw random numbers from one seed",
            )

    @property
    def are_values_same(self) -> bool:
        """Whether the tensors of all ranks have the same values."""
        return len({said[1] for said in self._said}) == 1

    def _by_rank(self, texts: Sequence[str]) -> str:
        parts = {text: [self._group.ranks[i] for i, other in enumerate(texts) if other == text] for text in texts}
        return ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in list(parts.items())[:4])

    def _raise(self, what: str, remedy: str) -> None:
        raise Mismatch(what, rank=self._group.world.job_rank, operation=self._operation, remedy=remedy)


def is_constant(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether each tensor has one value alone: parts of such ones are equal on all ranks."""
    return all(each.numel() < 2 or bool((each == each.reshape(-1)[0]).all()) for each in tensors)


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    digest = 0
    for each in tensors:
        flat = each.detach().reshape(-1)[:_MOST_ELEMENTS].cpu()
        digest = zlib.crc32(bytes_of(flat).numpy().data, digest)
    return digest


DEGREE = "context"

KEYS_TAG, GRADIENTS_TAG = 1, 2
"""Tags of messages around the ring: keys and values, and their gradients."""


@dataclass
class ContextTraffic:
    """What this rank has sent to others."""

    messages: int = 0
    """Calls: a hop of the ring, an all-to-all, or an all-gather."""
    sent_bytes: int = 0

    def add(self, sent_bytes: int) -> None:
        """Count one message."""
        self.messages += 1
        self.sent_bytes += sent_bytes


@dataclass(eq=False)
class ContextGroup:
    """The ranks of one context group, seen from one of them."""

    world: World
    group: dist.ProcessGroup
    rank: int
    size: int
    ranks: Sequence[int]
    """Their ranks in the world."""
    traffic: ContextTraffic = field(default_factory=ContextTraffic)
    """That of attention; agreements and proofs are not counted."""

    def start_hop(self, send: torch.Tensor, receive: torch.Tensor, tag: int) -> Hop:
        """Begin to send a contiguous tensor to the next rank of the ring, and to receive from the previous one."""
        self.traffic.add(send.nbytes)
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with translated(self.world, "ring attention"):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, send, group=self.group, tag=tag, group_peer=following),
                    dist.P2POp(dist.irecv, receive, group=self.group, tag=tag, group_peer=previous),
                ]
            )
        return Hop(self, works, send, receive)

    def all_to_all(self, send: torch.Tensor) -> torch.Tensor:
        """Send piece i of dimension 0 to rank i, and return the pieces of all ranks."""
        sent = send.nbytes // self.size * (self.size - 1)
        self.traffic.add(sent)
        received = torch.empty_like(send)
        with translated(self.world, "attention by heads"), inner_exchange(self.world, DEGREE, sent):
            dist.all_to_all_single(received, send, group=self.group)
        return received

    def all_gather(self, tensor: torch.Tensor, why: str, *, is_counted: bool = False) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which are of one shape and dtype; `why` names the call in errors."""
        sent = tensor.nbytes * (self.size - 1)
        if is_counted:
            self.traffic.add(sent)
        send = tensor.detach().contiguous()
        received = [torch.empty_like(send) for _ in range(self.size)]
        with (
            translated(self.world, why),
            inner_exchange(self.world, DEGREE, sent) if is_counted else nullcontext(),
        ):
            dist.all_gather(received, send, group=self.group)
        return received

    def gather_numbers(self, numbers: Sequence[int], why: str) -> list[list[int]]:
        """Return the numbers of all ranks, as many on each."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.world.device)
        return [each.tolist() for each in self.all_gather(mine, why)]


@dataclass
class Hop:
    """A message to the next rank and one from the previous, under way; both tensors are kept until `wait`."""

    group: ContextGroup
    works: list[dist.Work]
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return what was received, when both messages are through."""
        inner = inner_exchange(self.group.world, DEGREE, self.sent.nbytes)
        with translated(self.group.world, "ring attention"), inner:
            for work in self.works:
                work.wait()
        return self.received


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks, of 2 x `size`, that a rank holds. See [Note: zigzag]."""
    return rank, 2 * size - 1 - rank


def cut(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return the part of rank `rank` of a tensor whose dimension `dim` is a whole sequence; a copy."""
    if size == 1:
        return tensor
    length = tensor.shape[dim] // (2 * size)
    return torch.cat([tensor.narrow(dim, chunk * length, length) for chunk in chunks_of(rank, size)], dim)


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the whole sequence of the parts of all ranks, in order of ranks: the inverse of `cut`."""
    if len(parts) == 1:
        return parts[0]
    half = parts[0].shape[dim] // 2
    first = [part.narrow(dim, 0, half) for part in parts]
    second = [part.narrow(dim, half, half) for part in reversed(parts)]
    return torch.cat([*first, *second], dim)


def positions_of(whole: int, rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the positions in a sequence of `whole` tokens that a rank holds, int64, of shape (whole / size,)."""
    return cut(torch.arange(whole, dtype=torch.int64, device=device), 0, rank, size)

"""What a collective is made of: agreement of all ranks, pieces that change hands, and rows that are combined.

Two implementations: memory that the ranks of one host share (`host_exchange`), and messages (`message_exchange`).
Bytes are flat uint8 tensors; a rank is a number in the group. Every method is called by all ranks of the group, in
the same order, by one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ....core.vocabulary.errors import Mismatch

TEXT_BYTES = 512
"""The most of a text that says what a rank is about to do."""
SAME_CALLS = "all ranks of a group must make the same calls, with the same sizes and types, in the same order"


class GroupExchange(Protocol):
    """The ranks of one group, seen from one of them."""

    rank: int
    size: int

    def agree(self, call: str, row: Sequence[int], seconds: float) -> list[tuple[int, ...]]:
        """Begin a call; return the `row` of every rank, when all of them make the same `call`.

        Without a row, ranks may compare their calls later, with the first bytes that they exchange; until then
        nothing is written to the caller's tensors.

        Args:
            call: what this rank is about to do, in words.
            row: whole numbers that may differ between ranks, at most twice as many as there are ranks.
            seconds: how long each wait for other ranks may be, from here to the next `agree`.

        Raises:
            Mismatch: on all ranks, when calls differ.
            PeerLost: when another rank is gone.
            Stalled: when one does not come in time.
        """

    def conclude(self) -> None:
        """End the call: return when all have made it, and when the caller may change what was sent."""

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Fill `flat` with the bytes of `root`."""

    def all_gather(self, flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        """Fill `outs`, by rank, with the bytes of all others; mine are `flat`."""

    def publish(
        self, mine: torch.Tensor | None, incoming: Mapping[int, torch.Tensor], *, readers: Sequence[int]
    ) -> None:
        """Let `readers` have my bytes (None: I give none), and fill what others give me, by rank.

        All that are given have the same length.
        """

    def swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], longest: int
    ) -> None:
        """Give each rank its piece and fill `incoming`, by rank; `longest`: bytes of the longest piece of all."""

    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """Put all ranks' `flat` combined into every rank's, with the same bits on all."""

    def reduce_scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], operation: str) -> None:
        """Put what all ranks have as the piece of this rank, combined, into `out`; pieces are equally long."""


def differing(rank: int, calls: Sequence[str], names: Sequence[int]) -> Mismatch | None:
    """Return the error for ranks whose `calls` differ; None when all are equal. `names`: their global ranks."""
    other = next((i for i, call in enumerate(calls) if call != calls[rank]), None)
    if other is None:
        return None
    mine = calls[rank]
    text = f"rank {names[rank]} is at {mine}, rank {names[other]} at {calls[other]}"
    return Mismatch(text, rank=names[rank], operation=mine, remedy=SAME_CALLS)

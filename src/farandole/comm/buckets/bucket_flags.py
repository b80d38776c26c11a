"""What ranks tell each other of a coded bucket beside its gradients, in one message."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

NO_STEPS = 255
"""Announced by a rank that makes no step, and agrees with all."""


def steps_byte(steps: int | None) -> int:
    """Return the steps of a rank as they are announced; None: it makes none."""
    return NO_STEPS if steps is None else steps % NO_STEPS


class BucketFlags(NamedTuple):
    """Those of one rank before they travel: (...); of all ranks after it: (ranks, ...). All uint8."""

    flags: torch.Tensor
    """(..., k): whether it has NaN or infinity; for some buckets, whether it asks for a probe."""
    steps: torch.Tensor
    """(..., 1): see `steps_byte`."""
    used: torch.Tensor
    """(..., members): 0 for a member without a gradient."""

    @classmethod
    def of_rank(cls, flags: Collection[bool], steps: int, members: int, unused: Collection[int]) -> BucketFlags:
        """Return this rank's. `unused`: places of the members without a gradient."""
        used = torch.ones(members, dtype=torch.uint8)
        used[list(unused)] = 0
        return cls(torch.tensor(list(flags), dtype=torch.uint8), torch.tensor([steps], dtype=torch.uint8), used)

    @classmethod
    def unpack(cls, rows: torch.Tensor, flags: int) -> BucketFlags:
        """Return those of all ranks, with so many flags, from the bytes of `pack`: (ranks, bytes)."""
        return cls(rows[:, :flags], rows[:, flags : flags + 1], rows[:, flags + 1 :])

    def pack(self) -> torch.Tensor:
        """Return the bytes that travel."""
        return torch.cat(self)

    @property
    def steps_differ(self) -> bool:
        """Whether ranks are in different steps."""
        return len({*self.steps.flatten().tolist()} - {NO_STEPS}) > 1

    def users(self) -> list[int]:
        """Return how many ranks have a gradient for each member."""
        counts: list[int] = self.used.sum(0).tolist()
        return counts


NOTHING = BucketFlags(*(torch.empty(0, 0, dtype=torch.uint8) for _ in range(3)))
"""Before the first exchange."""

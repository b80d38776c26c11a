"""Whether the link is to be measured again: asked by each rank, answered for all, with every encoded exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ProbeRequest:
    """The request of one autotuner. Buckets send `by_this_rank` along and fill in `by_any_rank`."""

    by_this_rank: bool = False
    by_any_rank: bool = False

    def take(self) -> bool:
        """Return whether any rank asked in the last exchange, which is the same on all ranks, and forget it."""
        by_any_rank, self.by_any_rank = self.by_any_rank, False
        return by_any_rank

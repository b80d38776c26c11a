"""What is said of other ranks when an exchange with them goes wrong: which, and on which hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.vocabulary.errors import Mismatch, PeerLost, Stalled
from ...core.vocabulary.rank_lists import name_ranks


@dataclass
class Peers:
    """The ranks of a world, seen from one of them."""

    rank: int
    hosts: Sequence[str]
    """By rank."""
    names: Sequence[int] | None = None
    """What each rank is called in errors, where that is another number: ranks of a part of a job."""
    operation: str = "exchange"
    """What errors say was going on."""

    def stalled(self, ranks: Collection[int], seconds: float) -> Stalled:
        """Return the error for ranks that are waited for and send nothing."""
        remedy = "it is stuck, or did not make this call"
        return Stalled(f"{self._name(ranks)} sent nothing for {seconds:g} s", **self._where(remedy))

    def gone(self, lost: Mapping[int, str]) -> PeerLost:
        """Return the error for ranks that are waited for, whose connections were lost; `lost` says why."""
        # Those who left because another one did are not the cause.
        first = next((rank for rank in sorted(lost) if PeerLost.__name__ not in lost[rank]), min(lost))
        remedy = "look for the first failure among the other ranks"
        return PeerLost(f"{self._name([first])} is gone: {lost[first]}", **self._where(remedy))

    def too_long(self, rank: int, length: int, limit: int) -> Mismatch:
        """Return the error for a frame that is longer than any may be."""
        remedy = "the connection is damaged, or that of another program; all ranks must run the same model"
        text = f"{self._name([rank])} announced {length} bytes, and no message has more than {limit}"
        return Mismatch(text, **self._where(remedy))

    def other_length(self, rank: int, theirs: int, ours: int) -> Mismatch:
        """Return the error for a frame that is not as long as the receive that was posted for it."""
        remedy = "a codec must yield messages of the same shape on all ranks"
        return Mismatch(
            f"{self._name([rank])} sent {theirs} bytes where {ours} were expected", **self._where(remedy)
        )

    def _where(self, remedy: str) -> dict[str, Any]:
        return {"rank": self._named([self.rank])[0], "operation": self.operation, "remedy": remedy}

    def _name(self, ranks: Collection[int]) -> str:
        hosts = sorted({self.hosts[rank] for rank in ranks})
        return f"{name_ranks(self._named(ranks))} (on {', '.join(hosts)})"

    def _named(self, ranks: Collection[int]) -> list[int]:
        return sorted(ranks if self.names is None else (self.names[rank] for rank in ranks))

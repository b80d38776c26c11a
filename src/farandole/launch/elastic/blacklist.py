"""Hosts on which workers failed: no new workers there, for a while or for ever.

Unlike Horovod's, this list stops no worker that runs: the death of one process says little about its
neighbours. It only keeps new ones from being started where the last one died.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass
class Blacklist:
    """Counts failures by host. Times are of one clock, given by the caller."""

    range_seconds: tuple[float, float] | None = None
    """Least and longest delay; None: a failed host stays closed."""
    jitter: random.Random = field(default_factory=random.Random)
    _failures: dict[str, int] = field(default_factory=dict)
    _closed_until: dict[str, float] = field(default_factory=dict)

    def count_failure(self, host: str, now: float) -> float:
        """Close `host` and return until when (infinity: for ever).

        The delay doubles with every failure, with up to one least delay of chance added so that hosts
        that failed together do not come back together.
        """
        count = self._failures[host] = self._failures.get(host, 0) + 1
        until = float("inf")
        if self.range_seconds is not None:
            least, longest = self.range_seconds
            # Beyond 2**12 every delay is clipped; the exponent must not grow without bound.
            until = now + min(longest, least * 2.0 ** min(count, 12) + self.jitter.random() * least)
        self._closed_until[host] = until
        return until

    def is_open(self, host: str, now: float) -> bool:
        """Return whether new workers may be started on `host`."""
        return now >= self._closed_until.get(host, float("-inf"))

    def is_closed_for_ever(self, host: str) -> bool:
        """Return whether `host` will never open again."""
        return self._closed_until.get(host) == float("inf")

    def failures(self, host: str) -> int:
        """Return how often workers failed on `host`."""
        return self._failures.get(host, 0)

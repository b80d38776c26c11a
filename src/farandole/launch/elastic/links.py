"""Which hosts could not reach each other, by generation. No process and no socket here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass
class LinkFaults:
    """What members of failed generations told of hosts that do not answer them."""

    _missed: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    """Generations in which the first could not reach the second."""

    def note(self, host: str, missed: Collection[str], generation: int) -> None:
        """Take what a member on `host` says."""
        for other in missed:
            self._missed.setdefault((host, other), set()).add(generation)

    def forget(self, host: str) -> None:
        """The host is not in the job any more."""
        self._missed = {pair: found for pair, found in self._missed.items() if host not in pair}

    def who_misses(self, host: str, generation: int) -> list[str]:
        """Return the hosts that could not reach `host`, if it has not reported an unreachable host itself."""
        if any(first == host and generation in found for (first, _), found in self._missed.items()):
            return []
        return sorted(
            first for (first, second), found in self._missed.items() if second == host and generation in found
        )

    def host_to_drop(self, generation: int, order: Mapping[str, tuple[int, int]]) -> tuple[str, list[str]] | None:
        """Return a host to go on without, and who cannot reach it; None when no pair has failed twice running.

        The host that most others miss; of two that miss each other alone the later one by `order`, which also
        says which hosts there are.
        """
        pairs = {
            frozenset(pair)
            for pair in self._missed
            if self._fails(pair, generation) and self._fails(pair, generation - 1) and set(pair) <= order.keys()
        }
        if not pairs:
            return None
        count = Counter(host for pair in pairs for host in pair)
        worst = max(count, key=lambda host: (count[host], order[host]))
        return worst, sorted(host for pair in pairs if worst in pair for host in pair - {worst})

    def _fails(self, pair: tuple[str, str], generation: int) -> bool:
        return any(generation in self._missed.get(way, ()) for way in (pair, pair[::-1]))

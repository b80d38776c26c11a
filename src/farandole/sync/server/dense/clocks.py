"""Who is at which step, which pushes are applied in which order, and who may go on. Pure: no tensor, no socket.

[Note: one order of pushes] All servers apply the same pushes in the same order: that of the entries that
`Clocks` makes. A rank sends its gradients to all servers first, and says then that its step is done: only now is
there an entry, so a push that a rank did not finish before it died is in none. The ranks carry the entries to
the servers. With ``staleness=0`` an entry has the pushes of all ranks of one step, and is made when the last of
them is done; else it has one push, in the order in which they came.

[Note: bounded staleness] With ``staleness=s`` a rank begins its step number c when all others have done c - s
steps (stale synchronous parallel, Ho 2013). Ranks that have left, or that wait in `fd.drain` for the others, do
not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.vocabulary.errors import ConfigError

Entry = Mapping[str, Any]
"""JSON: ``of``, a list of [rank, step, weight in the sum of gradients], and ``rate``, by which learning rates are
multiplied."""


@dataclass(eq=False)
class Clocks:
    """The steps of the ranks that train."""

    staleness: int | None
    """How many steps ranks may be apart; None: any number."""
    done: dict[int, int]
    """Steps done, by rank that trains."""
    draining: set[int] = field(default_factory=set)
    """Ranks that wait for the others to make no more steps."""
    first: int = 0
    """Entries that are not kept any more: all ranks have them."""
    entries: list[Entry] = field(default_factory=list)
    """The later ones."""
    staleness_counts: Counter[int] = field(default_factory=Counter)
    """Pushes by how many entries were made between what their rank had read and their own."""
    shares: dict[int, float] = field(default_factory=dict)
    """By rank: the share of the samples in a step that is done and has no entry yet."""

    @property
    def version(self) -> int:
        """Entries so far."""
        return self.first + len(self.entries)

    def finish(self, rank: int, step: int, share: float, seen: int) -> list[Entry]:
        """A rank has sent its gradients of a step to all servers; return the entries that are made by that.

        Args:
            rank: one that trains.
            step: its number on this rank, from 0.
            share: how many samples they are of, over the mean of the ranks.
            seen: the version of the parameters that the gradients are of.
        """
        if step < self.done[rank] or rank in self.shares:
            return []  # it was said before
        if step > self.done[rank]:
            raise ConfigError(f"rank {rank} says that step {step} is done after {self.done[rank]} steps")
        if self.staleness == 0:
            self.shares[rank] = share
            return self._whole_step()
        self.staleness_counts[self.version - seen] += 1
        self.done[rank] += 1
        rate = share / len(self.done)
        return self._add({"of": [[rank, step, 1.0 if rate else 0.0]], "rate": rate})

    def leave(self, rank: int) -> list[Entry]:
        """A rank makes no more steps; return the entries that are made because no rank waits for it any more."""
        self.draining.discard(rank)
        if self.done.pop(rank, None) is None:
            return []
        # A step that it has finished counts: all servers have its gradients.
        return self._whole_step(gone=rank) if self.staleness == 0 else []

    def may_begin(self, rank: int) -> bool:
        """Return whether a rank may make its next step. See [Note: bounded staleness]."""
        if self.staleness is None:
            return True
        if self.staleness == 0:
            return rank not in self.shares
        others = [steps for other, steps in self.done.items() if other not in self.draining]
        return self.done[rank] <= min(others, default=self.done[rank]) + self.staleness

    def since(self, seen: int) -> list[Entry]:
        """Return the entries after the first `seen`."""
        assert seen >= self.first, f"entries before {self.first} are gone, and {seen} is asked for"
        return self.entries[seen - self.first :]

    def forget(self, seen: int) -> None:
        """Keep no entries before `seen`: all ranks have them."""
        count = max(0, seen - self.first)
        del self.entries[:count]
        self.first += count

    def adopt(self, version: int, entry: Entry) -> None:
        """Take an entry that was made before a restoration, as number `version`."""
        if version != self.version:
            return
        for rank, step, _ in entry["of"]:
            if rank in self.done:
                self.done[rank] = max(self.done[rank], step + 1)
            self.shares.pop(rank, None)
        self.entries.append(entry)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "done": sorted(self.done.items()), "draining": sorted(self.draining), "first": self.first,
            "entries": list(self.entries), "counts": sorted(self.staleness_counts.items()),
            "shares": sorted(self.shares.items()),
        }  # fmt: skip

    @classmethod
    def from_json(cls, staleness: int | None, values: Mapping[str, Any]) -> Clocks:
        """Return the clocks whose state `to_json` returned."""
        return cls(
            staleness, dict(_pairs(values["done"])), set(values["draining"]), values["first"],
            list(values["entries"]), Counter(dict(_pairs(values["counts"]))), dict(_pairs(values["shares"])),
        )  # fmt: skip

    def _whole_step(self, gone: int | None = None) -> list[Entry]:
        """Return the entry of a step that all ranks have done."""
        if not self.shares or not set(self.done) <= set(self.shares) or (gone is not None and not self.done):
            return []
        total = sum(self.shares[rank] for rank in sorted(self.shares))
        steps = {rank: self.done[rank] for rank in self.done}
        step = next(iter(steps.values()))
        of = [[rank, step, share / total if total else 0.0] for rank, share in sorted(self.shares.items())]
        self.staleness_counts[0] += len(of)
        for rank in self.done:
            self.done[rank] += 1
        self.shares.clear()
        return self._add({"of": of, "rate": 1.0 if total else 0.0})

    def _add(self, entry: Entry) -> list[Entry]:
        self.entries.append(entry)
        return [entry]


def _pairs(values: Sequence[Sequence[Any]]) -> Iterable[tuple[int, Any]]:
    return ((int(key), value) for key, value in values)

"""Ranks that end well while others still wait for them.

To end first is no fault: rank 0 may have a checkpoint to save. It is one when the others have not met yet, which
they never will then; and worth a word when the others do nothing any more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.run_files import events_path, stacks_path
from .failure import Exit
from .stopped_process import stat_of

LOOK_SECONDS = 0.5
MEETING_SECONDS = 2.0
"""Time to wait in `fd.init` after a rank has ended: the others may form a world without it."""
IDLE_SECONDS = 5.0
_BUSY_SHARE = 0.05
"""Fraction of a core; below it a process only waits."""


@dataclass(frozen=True)
class Left:
    """A rank that has ended well, and those that wait."""

    rank: int
    waiting: tuple[int, ...]
    is_missed: bool
    """Whether the others cannot go on without it."""

    def to_text(self) -> str:
        """Return a message about waiting ranks, while no rank has failed."""
        return (
            f"note: rank {self.rank} ended with exit code 0 before the others, and {name_ranks(self.waiting)} "
            f"did nothing for {IDLE_SECONDS:g} s: waiting for rank {self.rank}?"
        )


@dataclass
class LeaverWatch:
    """Looks, from time to time, at what the other ranks do once one has ended well."""

    run_directory: Path
    _looked: float = 0.0
    _meeting_since: float | None = None
    _idle_since: float | None = None
    _used: dict[int, float] = field(default_factory=dict)
    """CPU time of each process at the last check."""
    _has_spoken: bool = False

    def look(self, now: float, exits: Sequence[Exit], running: Mapping[int, int]) -> Left | None:
        """Return what there is to say, if anything: once that others are idle, or that they can never meet.

        `running`: process of each rank that runs.
        """
        passed = now - self._looked
        left = next((ended.rank for ended in exits if ended.left), None)
        if left is None or not running or passed < LOOK_SECONDS:
            return None
        self._looked = now
        waiting = self._meeting_without(left, running)
        self._meeting_since = None if not waiting else now if self._meeting_since is None else self._meeting_since
        if self._meeting_since is not None and now - self._meeting_since >= MEETING_SECONDS:
            return Left(left, waiting, is_missed=True)
        if self._are_busy(running, passed):
            self._idle_since = None
            return None
        self._idle_since = now if self._idle_since is None else self._idle_since
        if self._has_spoken or now - self._idle_since < IDLE_SECONDS:
            return None
        self._has_spoken = True
        return Left(left, tuple(sorted(running)), is_missed=False)

    def _meeting_without(self, left: int, running: Mapping[int, int]) -> tuple[int, ...]:
        """Return the ranks in `fd.init`, when the one that left has never been through it."""
        if events_path(self.run_directory, left).exists():
            return ()
        return tuple(
            rank
            for rank in sorted(running)
            if stacks_path(self.run_directory, rank).exists()
            and not events_path(self.run_directory, rank).exists()
        )

    def _are_busy(self, running: Mapping[int, int], passed: float) -> bool:
        used = {process: processor_seconds(process) for process in running.values()}
        spent = sum(used[process] - self._used.get(process, 0.0) for process in used)
        self._used = used
        return spent > _BUSY_SHARE * passed * len(used)


def processor_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used; 0 if it is gone."""
    used = stat_of(process)[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")

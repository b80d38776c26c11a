"""Which rows are kept, so that the records of a run of any length stay below a bound.

Half of the bound takes every step. Half of the rest takes every 10th, half of that every 100th, and so on:
a million steps of 2 kB each fit into 64 MiB. The steps between two that are kept become one row of sums. Ranks
reach the limits at different times, but keep the same steps: multiples of the stride.
"""

from __future__ import annotations

from .phases import step_seconds
from .rows import StepRow, ThinnedRow

BOUND_BYTES = 64 * 2**20
STRIDE_FACTOR = 10
SAMPLES_FACTOR = 4
LAST_LEVEL = 12


class Downsampler:
    """Decides by the bytes written so far; adds up the omitted steps."""

    def __init__(self, bound_bytes: int = BOUND_BYTES) -> None:
        self._bound_bytes = bound_bytes
        self._samples_seen = 0
        self._sums: ThinnedRow | None = None

    def level(self, written_bytes: int) -> int:
        """Return how many times what may still be written has been halved."""
        level, limit = 0, self._bound_bytes / 2
        while written_bytes >= limit and level < LAST_LEVEL:
            level += 1
            limit += (self._bound_bytes - limit) / 2
        return level

    def take_step(self, row: StepRow, written_bytes: int) -> list[StepRow | ThinnedRow]:
        """Return what to write now: nothing, the step, or the sums of those left out and the step."""
        level = self.level(written_bytes)
        if level and (level == LAST_LEVEL or row.step % STRIDE_FACTOR**level):
            self._sums = add_up(self._sums, row)
            return []
        return [*self.close(), row]

    def takes_sample(self, written_bytes: int) -> bool:
        """Return whether to write the coming sample."""
        self._samples_seen += 1
        level = self.level(written_bytes)
        return level < LAST_LEVEL and self._samples_seen % SAMPLES_FACTOR**level == 0

    def close(self) -> list[StepRow | ThinnedRow]:
        """Return the sums of the steps omitted since the last row."""
        sums, self._sums = self._sums, None
        return [] if sums is None else [sums]


def add_up(sums: ThinnedRow | None, row: StepRow) -> ThinnedRow:
    """Return the sums of some steps and the step after them."""
    alone = ThinnedRow(
        row.step, row.step, 1, row.begin_seconds, row.end_seconds, row.samples, row.tokens or 0, row.sent_bytes,
        step_seconds(row), row.step, row.end_seconds - row.begin_seconds,
    )  # fmt: skip
    return alone if sums is None else merge(sums, alone)


def merge(sums: ThinnedRow, later: ThinnedRow) -> ThinnedRow:
    """Return the sums of some steps and of those after them."""
    slowest = later if later.slowest_seconds > sums.slowest_seconds else sums
    seconds = dict(sums.seconds)
    for name, more in later.seconds.items():
        seconds[name] = seconds.get(name, 0.0) + more
    return ThinnedRow(
        sums.first_step,
        later.last_step,
        sums.steps + later.steps,
        sums.begin_seconds,
        later.end_seconds,
        sums.samples + later.samples,
        sums.tokens + later.tokens,
        sums.sent_bytes + later.sent_bytes,
        seconds,
        slowest.slowest_step,
        slowest.slowest_seconds,
    )

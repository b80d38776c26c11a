"""The buckets of a stage as a table: equal ones are counted, and all are replayed at once.

[Note: replaying a table] The recurrence of `core.step_model.replay`, e(i) = max(ready(i), e(i - 1)) + t(i), is
max over j of (ready(j) + t(j) + ... + t(last)). So a thousand buckets take one pass over arrays. A test compares
both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.step_model.link import LinkModel
from ...core.step_model.replay import BucketLoad, Replay


@dataclass(frozen=True)
class BucketKind:
    """Gradients that travel together."""

    nbytes: int
    """As it travels, with its end."""
    gradient_bytes: int
    codec: str
    sent_ratio: float
    """Bytes that its codec sends over those of the exact exchange; by the codec's formula."""
    place: int = 0
    """Position of the unit of its last gradient in the stage, in the order of backward."""
    progress: float = 0.0
    """How many units of this place backward has passed when it is ready."""
    starts: int = 1
    """How often its codec begins: for each matrix, if it is one of matrices."""

    def kind(self) -> BucketKind:
        """Return what equal buckets have in common."""
        return replace(self, place=0, progress=0.0)


@dataclass(frozen=True)
class BucketTable:
    """Buckets in the order in which they leave."""

    kinds: tuple[BucketKind, ...]
    counts: tuple[int, ...]
    """How many there are of each kind."""
    kind_of: np.ndarray[Any, np.dtype[np.int64]]
    """By bucket."""
    places: np.ndarray[Any, np.dtype[np.int64]]
    progress: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, buckets: Sequence[BucketKind]) -> BucketTable:
        """Return the table of `buckets`."""
        kinds = Counter(each.kind() for each in buckets)
        number = {kind: i for i, kind in enumerate(kinds)}
        return cls(
            tuple(kinds),
            tuple(kinds.values()),
            np.array([number[each.kind()] for each in buckets], dtype=np.int64),
            np.array([each.place for each in buckets], dtype=np.int64),
            np.array([each.progress for each in buckets], dtype=np.float64),
        )

    def __iter__(self) -> Iterator[BucketKind]:
        """The buckets, in the order in which they leave."""
        for number, place, progress in zip(self.kind_of, self.places, self.progress, strict=True):
            kind = self.kinds[int(number)]
            yield replace(kind, place=int(place), progress=float(progress))

    def replay(
        self, loads: Sequence[BucketLoad], begins: Sequence[float], each: Sequence[float], link: LinkModel, *,
        slow: float, shares_core: bool,
    ) -> Replay:  # fmt: skip
        """Return when the last bucket has arrived. See [Note: replaying a table].

        Args:
            loads: what buckets of each kind need; when they are ready is not asked.
            begins: when backward reaches each place.
            each: what one unit of a place takes.
            link: while the ranks compute.
            slow: by how much backward takes longer while buckets are on their way.
            shares_core: whether codecs take their time from backward.
        """
        alone = np.asarray(begins)[self.places] + self.progress * np.asarray(each)[self.places]
        taken = np.array([load.intra_host_seconds + load.on_link(link) for load in loads])[self.kind_of]
        ready = alone + (slow - 1.0) * np.minimum(alone, np.cumsum(taken) - taken)
        cpu = np.array([load.cpu_seconds + load.intra_host_seconds for load in loads])[self.kind_of]
        if shares_core:
            ready += np.cumsum(cpu) - cpu
        behind = np.cumsum(taken[::-1])[::-1]
        end = float((ready + behind).max()) + loads[int(self.kind_of[-1])].decode_seconds
        return Replay(end, float(cpu.sum()))

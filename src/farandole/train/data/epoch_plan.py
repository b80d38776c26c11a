"""One epoch's order, cut into the job's batches, and this rank's part of each: what one iteration goes by.

An iteration has a plan of its own, so that two loops over one loader do not disturb each other. The order is drawn
when it is needed first: for a sampler of the user's own that is a message from rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from ..balance import ShareChanges
from .partition import Part, Partition
from .position import LoopPlace


class Step(NamedTuple):
    """One of the job's batches, as one rank sees it."""

    part: Part
    used: int
    """How far it goes in the job's order."""


class Order(NamedTuple):
    """An order of samples."""

    samples: torch.Tensor | range
    sizes: Sequence[int] | None = None
    """Samples of each of the job's batches, where these differ."""


class EpochPlan:
    """The rest of an epoch of single samples, from `place` on."""

    def __init__(
        self,
        place: LoopPlace,
        partition: Partition,
        draw: Callable[[LoopPlace], Order],
        seed: int,
        changes: ShareChanges | None = None,
    ) -> None:
        """`changes`: of the shares of the ranks, where these are not equal."""
        self.place = place
        self.begin = place.used
        self.seed = seed
        self._batches_before = place.batches
        self._partition = partition
        self._draw = draw
        self._changes = changes

    @cached_property
    def order(self) -> Order:
        """The samples, from where the order was cut last."""
        return self._draw(self.place)

    @property
    def total_steps(self) -> int:
        """This rank's steps in the epoch, with those before `place`."""
        return self._batches_before + sum(1 for _ in self.steps())

    def steps(self) -> Iterator[Step]:
        """Yield what is known of each of this rank's batches."""
        return self._walk(draws=False)

    def batches(self) -> Iterator[list[int]]:
        """Yield the indexes of each of this rank's batches."""
        samples = self.order.samples
        for part, _ in self._walk(draws=True):
            positions = part.positions
            if isinstance(samples, range):
                yield [samples[position] for position in positions]
            else:
                yield samples[positions.start : positions.stop].tolist()

    def _walk(self, *, draws: bool) -> Iterator[Step]:
        """`draws`: the batches are given out, by the shares of now. See [Note: where shares change]."""
        samples, sizes = self.order
        cut = self.place.cuts[-1].begin if self.place.cuts else 0
        whole = self._partition.whole
        if sizes is None:
            starts = range(self.begin - cut, len(samples), whole)
            runs = [(start, min(whole, len(samples) - start)) for start in starts]
        else:
            ends = list(accumulate(sizes))
            runs = [
                (end - size, size) for end, size in zip(ends, sizes, strict=True) if end - size >= self.begin - cut
            ]
        for position, size in runs:
            if size < whole and self._partition.drop_last:
                continue
            part = self._divided(cut + position, size, draws=draws).part(position, size)
            if part is not None:
                yield Step(part, size)

    def _divided(self, used: int, size: int, *, draws: bool) -> Partition:
        if self._changes is None:
            return self._partition
        iteration = self.place.iteration
        found = self._changes.draw(iteration, used, used + size) if draws else self._changes.at(iteration, used)
        return replace(self._partition, division=found)


class RoundsPlan:
    """The rest of an epoch of whole batches of the user's, dealt to the ranks in turn."""

    def __init__(
        self, place: LoopPlace, partition: Partition, draw: Callable[[LoopPlace], Sequence[Sequence[int]]]
    ) -> None:
        self.place = place
        self.begin = place.used
        self._batches_before = place.batches
        self._partition = partition
        self._draw = draw

    @cached_property
    def order(self) -> Sequence[Sequence[int]]:
        """All batches of the epoch."""
        return self._draw(self.place)

    @property
    def total_steps(self) -> int:
        """This rank's steps in the epoch, with those before `place`."""
        return self._batches_before + sum(1 for _ in self.steps())

    def steps(self) -> Iterator[Step]:
        """Yield what is known of each of this rank's batches."""
        for round_ in self._rounds():
            sizes = [len(batch) for batch in round_]
            own = sizes[self._partition.rank] if self._partition.rank < len(sizes) else 0
            if own or self._partition.placeholders:
                yield Step(Part(range(0), own, own * self._partition.size / sum(sizes)), len(sizes))

    def batches(self) -> Iterator[list[int]]:
        """Yield this rank's batches."""
        for round_ in self._rounds():
            if self._partition.rank < len(round_):
                yield list(round_[self._partition.rank])
            elif self._partition.placeholders:
                yield list(self.order[0])  # the whole: a loss may need several samples

    def _rounds(self) -> Iterator[Sequence[Sequence[int]]]:
        for first in range(self.begin, len(self.order), self._partition.size):
            yield self.order[first : first + self._partition.size]

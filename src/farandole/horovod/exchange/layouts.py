"""What ranks have in a buffer, compared when they exchange it first.

Gradients of one type travel side by side in one buffer, named by their place. Buffers of equal length with
different things in them would be added up silently. So each rank says what its buffer holds, once for each name,
layout and world, before it exchanges it.

[Note: the same name] It says so in an allgather of the same name as the operation itself. A rank whose gradients
are other ones than in the step before asks, while the others go on with their operation: under one name that is a
mismatch, and an error on all ranks. Under two names each would wait for the other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...core.vocabulary.codec_spec import NONE
from ..common.basics import basics
from ..common.exceptions import HorovodMismatchError
from ..common.operations import begin, wait
from ..named_ops.operations import Request


class Place(NamedTuple):
    """One gradient of a list."""

    label: str
    """What a reader knows it by; need not be unique."""
    shape: tuple[int, ...]
    dtype: str
    """Empty: this rank has no gradient for the variable."""

    def describe(self) -> str:
        """Return it for a message."""
        return f"{self.dtype}{list(self.shape)}" if self.dtype else "no gradient"


def layout_text(places: Sequence[Place]) -> str:
    """Return the layout as one line."""
    return json.dumps(places, separators=(",", ":"))


class Layouts:
    """Which layouts were compared in this world."""

    def __init__(self) -> None:
        self._compared: set[tuple[str, str]] = set()
        self._last: dict[str, str] = {}
        """The layout that was compared last, by name."""

    def clear(self) -> None:
        """Forget everything: the world is over."""
        self._compared.clear()
        self._last.clear()

    def question(self, name: str, layout: str, process_set: int = 0) -> Request | None:
        """Return what is to be exchanged before the operation `name`; None when the layout was compared.

        See [Note: the same name].
        """
        if (name, layout) in self._compared:
            return None
        sent = torch.frombuffer(bytearray(layout.encode() + b"\n"), dtype=torch.uint8)
        return Request(name, "allgather", sent, process_set=process_set)

    def compare_now(self, name: str, layout: str, process_set: int = 0, *, again: bool = False) -> None:
        """Compare a layout with those of the other ranks, and wait for them. `again`: also one that was compared.

        Raises `HorovodMismatchError`, on all ranks, when they differ.
        """
        if again:
            self._compared.discard((name, layout))
        question = self.question(name, layout, process_set)
        if question is None:
            return
        try:
            told = wait(begin([question]))[0]
        except HorovodMismatchError as problem:
            raise self.explained(problem, name, layout) from problem
        self.compare(name, layout, told)

    def explained(self, problem: Exception, name: str, layout: str) -> Exception:
        """Return a mismatch of the operation `name` with what it means, and other errors as they are."""
        if not isinstance(problem, HorovodMismatchError):
            return problem
        before = self._last.get(name)
        changed = "" if before in (None, layout) else f" ({_difference(str(before), layout, 'before', 'now')})"
        return HorovodMismatchError(
            f"{problem}; an operation of this name carries gradients, and the ranks have different ones in this "
            f"step{changed}: all ranks must have gradients of the same variables in each step"
        )

    def compare(self, name: str, layout: str, told: torch.Tensor) -> None:
        """Take the layouts of all ranks; raise `HorovodMismatchError`, on all of them, when they differ."""
        lines = bytes(told.numpy()).decode().splitlines()
        first = lines[0]
        for rank, line in enumerate(lines):
            if line != first:
                difference = _difference(first, line, "on rank 0", f"on rank {rank}")
                raise HorovodMismatchError(
                    f"{name}: {difference}: build the same model on all ranks, and "
                    "compute gradients of the same variables"
                )
        self._compared.add((name, layout))
        self._last[name] = layout


def _difference(first: str, other: str, here: str, there: str) -> str:
    pairs = itertools.zip_longest(_places(first), _places(other))
    for number, (mine, theirs) in enumerate(pairs):
        if mine is None or theirs is None:
            present, missing = (there, here) if mine is None else (here, there)
            return f"gradient {number} ({(mine or theirs).label}) is there {present}, but not {missing}"
        if mine != theirs:
            return (
                f"gradient {number} is {mine.describe()} of {mine.label} {here}, but {theirs.describe()} of "
                f"{theirs.label} {there}"
            )
    return f"the gradients {here} and {there} differ"


def _places(line: str) -> list[Place]:
    return [Place(label, tuple(shape), dtype) for label, shape, dtype in json.loads(line)]


layouts = Layouts()
"""Those of this process."""
basics.call_on_shutdown(layouts.clear)


# Which gradients travel in one buffer, and where in it each one lies. Pure.
#
# [Note: padded] Each gradient begins at a multiple of 64 bytes: TensorFlow then takes the buffer apart without a
# copy, and what is sent grows by less than 64 bytes for each of them.


PAD_BYTES = 64
"""See [Note: padded]."""


@dataclass(frozen=True)
class GradientPart:
    """One gradient that is to travel."""

    index: int
    """Its place in the list of gradients."""
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    codec: str = NONE
    alone: bool = False
    """Whether it travels in its own shape: for codecs that want a matrix."""
    group: int | None = None
    """The number of the group that it was put in; None: in none."""

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def padded(self) -> int:
        """How many numbers it takes up in a buffer."""
        unit = max(1, PAD_BYTES // self.itemsize)
        return -(-self.elements // unit) * unit


@dataclass(frozen=True)
class FlatBucket:
    """Gradients that travel as one buffer."""

    parts: tuple[GradientPart, ...]

    @property
    def codec(self) -> str:
        """How it travels."""
        return self.parts[0].codec

    @property
    def is_whole(self) -> bool:
        """Whether it is one gradient in its own shape."""
        return self.parts[0].alone

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients, without what pads them."""
        return sum(part.elements * part.itemsize for part in self.parts)

    @property
    def sizes(self) -> list[int]:
        """How many numbers each part takes up."""
        return [part.padded for part in self.parts]


def plan_buckets(parts: Sequence[GradientPart], bucket_bytes: int) -> list[FlatBucket]:
    """Return the buckets in the order in which they are likely to be complete.

    Gradients become ready from the last layer to the first, so buckets are filled from the end. A bucket has one
    type and one codec, and is closed when it has `bucket_bytes`; a group is a bucket of its own, however large.
    """
    open_ones: dict[tuple[str, str, int | None], list[GradientPart]] = {}
    closed: list[list[GradientPart]] = []
    for part in reversed(parts):
        if part.alone:
            closed.append([part])
            continue
        key = (part.dtype, part.codec, part.group)
        filled = open_ones.setdefault(key, [])
        if not filled:
            closed.append(filled)
        filled.append(part)
        if part.group is None and sum(each.padded * each.itemsize for each in filled) >= bucket_bytes:
            del open_ones[key]
    return [FlatBucket(tuple(sorted(bucket, key=lambda part: part.index))) for bucket in closed]

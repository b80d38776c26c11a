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
from typing import NamedTuple

import torch

from ...comm.named_ops.operations import Request
from ..common.basics import basics
from ..common.exceptions import HorovodMismatchError
from ..common.operations import begin, wait


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

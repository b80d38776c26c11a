"""What tells things apart: optimizers and tapes by name on all ranks, variables by identity on one.

[Note: made again] An elastic job begins its function again when ranks come or go. What the function makes is made
again by ranks that went on, and for the first time by new ones; what was made before it is there once on all. So
the numbers that the function has taken are given back before it begins again: see `run` in
`horovod.keras.layer.elastic`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...comm.messages import bytes_of
from ..common.basics import basics
from ..common.exceptions import HorovodInternalError, HorovodMismatchError
from ..common.objects import allgather_object
from ..common.operations import begin, operation_names, set_number, wait
from ..common.process_sets import ProcessSet, global_process_set
from ..named_ops.operations import DTYPES, Request

# The last error of an exchange inside a compiled step: frameworks keep its text, in an error of their own.


class Failures:
    """Which of our errors a framework's was made of."""

    def __init__(self) -> None:
        self.last: HorovodInternalError | None = None

    def note(self, problem: BaseException) -> None:
        """Remember an error that is handed to a framework."""
        if isinstance(problem, HorovodInternalError):
            self.last = problem

    def behind(self, error: BaseException) -> HorovodInternalError | None:
        """Return which of ours a framework's `error` was made of; None when it is not one of ours."""
        if isinstance(error, HorovodInternalError):
            return error
        last = self.last
        return last if last is not None and str(last) in str(error) else None


failures = Failures()
"""Those of this process."""


# The end of one generation of an elastic job and the beginning of the next, for all front ends.


def meet_again() -> None:
    """Leave the world, and join that of the ranks that are there now."""
    from ...train.session import shutdown as leave

    basics.shutdown()
    leave()  # the world too, when the program opened it before `hvd.init`
    basics.init()


class MadeObjects:
    """How many objects of each kind this process has made."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def next_name(self, kind: str) -> str:
        """Return a name for the next object of a kind, for example ``Adam.0``.

        It is the same on all ranks that make such objects in the same order.
        """
        number = self._counts[kind]
        self._counts[kind] += 1
        return f"{kind}.{number}"

    def mark(self) -> dict[str, int]:
        """Return what `go_back` takes."""
        return dict(self._counts)

    def go_back(self, marked: dict[str, int]) -> None:
        """Count as at the time of `marked`. See [Note: made again]."""
        self._counts = Counter(marked)


made_objects = MadeObjects()
"""Those of this process."""
next_name = made_objects.next_name


def key_of(variable: Any) -> int:
    """Return what tells variables apart: the same for a variable of Keras and what is inside it.

    It is not read by `value`, which may have to make something.
    """
    inner = variable._value if hasattr(variable, "_value") else getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def label_of(variable: Any) -> str:
    """Return what a reader knows a variable by. Not unique, and without what Keras counts up."""
    path = getattr(variable, "path", None)
    if isinstance(path, str):
        return path.partition("/")[2] or path
    return str(getattr(variable, "name", variable)).partition(":")[0]


def without_count(label: str) -> str:
    """Return a label without the number that Keras has counted up: ranks that made other models first differ.

    For example "dense/kernel" for "dense_3/kernel".
    """
    layer, slash, rest = label.partition("/")
    return f"{re.sub(r'_[0-9]+$', '', layer)}{slash}{rest}" if slash else label


# Variables of any framework from one rank to all, through NumPy.


def broadcast_arrays(
    labels: Sequence[str],
    arrays: Sequence[np.ndarray[Any, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of rank `root_rank`.

    Args:
        labels: what a reader knows each array by, for messages.
        arrays: the same number on all ranks, each with the same shape and type.
        root_rank: the rank whose arrays are sent.
        process_set: the ranks that take part.

    Raises:
        HorovodMismatchError: ranks have other arrays; on all of them.
    """
    _require_alike(labels, arrays, process_set)
    number = set_number(process_set, "Broadcast")
    buffers = [as_torch(array, "broadcast of variables") for array in arrays]
    tickets = []
    for buffer in buffers:
        name = operation_names.name("broadcast", None, process_set)
        tickets += begin([Request(name, "broadcast", buffer, in_place=True, root=root_rank, process_set=number)])
    if tickets:
        wait(tickets)
    if basics.rank() == root_rank:
        return list(arrays)
    return [as_array(buffer, array.dtype) for buffer, array in zip(buffers, arrays, strict=True)]


def _require_alike(labels: Sequence[str], arrays: Sequence[np.ndarray[Any, Any]], process_set: ProcessSet) -> None:
    mine = [(label, array.shape, str(array.dtype)) for label, array in zip(labels, arrays, strict=True)]
    first, *others = allgather_object(mine, process_set=process_set)
    for place, other in enumerate(others, start=1):
        if len(other) != len(first):
            raise HorovodMismatchError(
                f"broadcast of variables: {len(first)} on the first rank, but {len(other)} on rank {place}: build "
                "the model and the optimizer on all ranks alike before they are broadcast"
            )
        for number, (theirs, ours) in enumerate(zip(other, first, strict=True)):
            if theirs[1:] != ours[1:]:
                raise HorovodMismatchError(
                    f"broadcast of variables: number {number} is {ours[0]}, {ours[2]}{list(ours[1])}, on the "
                    f"first rank, but {theirs[0]}, {theirs[2]}{list(theirs[1])}, on rank {place}: build the same "
                    "model on all ranks"
                )


def as_torch(array: np.ndarray[Any, Any], title: str) -> torch.Tensor:
    """Return a copy of an array as a tensor of the same type; raise ValueError for types that cannot travel."""
    wanted = DTYPES.get(str(array.dtype))
    if wanted is None:
        raise ValueError(
            f"{title}: Tensor type {array.dtype} is not supported. Types that travel: numbers and bool"
        )
    flat = (
        torch.frombuffer(bytearray(np.ascontiguousarray(array).tobytes()), dtype=torch.uint8)
        if (array.nbytes)
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(wanted).view(array.shape)


def as_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a tensor as an array of the same type, which torch may not know: bfloat16 is none of NumPy's own."""
    plain = bytes_of(tensor).numpy()
    shaped: np.ndarray[Any, Any] = plain.view(dtype).reshape(tuple(tensor.shape))
    return shaped

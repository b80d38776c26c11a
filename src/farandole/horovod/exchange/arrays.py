"""Variables of any framework from one rank to all, through NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...comm.messages import bytes_of
from ...comm.named_ops.operations import DTYPES, Request
from ..common.basics import basics
from ..common.exceptions import HorovodMismatchError
from ..common.objects import allgather_object
from ..common.operations import begin, operation_names, set_number, wait
from ..common.process_sets import ProcessSet, global_process_set


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

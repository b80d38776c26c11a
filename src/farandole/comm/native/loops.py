"""The native loops as methods on tensors. `loops.c` says what each computes.

A tensor here is contiguous, on the processor, and float32 unless said otherwise; callers see to that. A call
releases the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from ...core.env import native_loops_are_wanted
from .build import Unusable, load_library

Format = Literal["int8", "int4", "bf16", "fp16"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "bf16", "fp16")
LARGEST_BLOCK = 1024
"""Elements; TILE in `loops.c`."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_log = logging.getLogger("farandole")


class Loops:
    """The library's functions, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise `AttributeError` when a function is missing."""

        def function(name: str, *arguments: type[ctypes.c_void_p | ctypes.c_int64]) -> Callable[..., None]:
            found = library[f"farandole_{name}"]
            found.argtypes, found.restype = arguments, None
            return found

        each = (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT)
        self._encode = {name: function(f"encode_{name}", *each) for name in FORMATS}
        self._land = {name: function(f"land_{name}", *each) for name in FORMATS}
        self._add_up = {
            name: function(
                f"add_up_{name}", _POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _POINTER, _COUNT, _COUNT
            )
            for name in FORMATS
        }
        self._sum_rows = function("sum_rows", _POINTER, _COUNT, _COUNT, _COUNT)

    def encode(
        self, how: Format, values: torch.Tensor, residual: torch.Tensor, packed: torch.Tensor, *, block: int
    ) -> None:
        """Pack values + residual into `packed` (uint8); leave in `values` what was not sent."""
        self._encode[how](values.data_ptr(), residual.data_ptr(), packed.data_ptr(), values.numel(), block)

    def add_up(
        self,
        how: Format,
        values: torch.Tensor,
        residual: torch.Tensor,
        pieces: torch.Tensor,
        packed: torch.Tensor,
        *,
        mine: int,
        block: int,
    ) -> None:
        """Pack the mean of values + residual and what the other rows of `pieces` stand for.

        `pieces` is uint8, (ranks, bytes); row `mine` is not read.
        Leaves in `values` what this rank has to remember, the rounding of the mean too.
        """
        self._add_up[how](
            values.data_ptr(), residual.data_ptr(), pieces.data_ptr(), pieces.stride(0), mine, pieces.shape[0],
            packed.data_ptr(), values.numel(), block,
        )  # fmt: skip

    def land(
        self, how: Format, packed: torch.Tensor, values: torch.Tensor, residual: torch.Tensor, *, block: int
    ) -> None:
        """Move `values` to `residual`, and write what `packed` (uint8) stands for in their place."""
        self._land[how](packed.data_ptr(), values.data_ptr(), residual.data_ptr(), values.numel(), block)

    def row_sum(self, parts: Sequence[torch.Tensor]) -> Callable[[int], None]:
        """Return what adds `parts`, two or more, in their order and writes the sum into the first n of them."""
        pointers = (_POINTER * len(parts))(*(part.data_ptr() for part in parts))
        rows, elements = len(parts), parts[0].numel()
        return lambda targets: self._sum_rows(pointers, rows, targets, elements)


def loops() -> Loops | None:
    """Return the loops; None where FARANDOLE_NATIVE is 0 or none can be made. The first call may take seconds."""
    return _load() if native_loops_are_wanted() else None


@cache
def _load() -> Loops | None:
    try:
        return Loops(load_library(Path(__file__).with_name("loops.c")))
    except (Unusable, AttributeError) as problem:
        _log.debug("no native loops: %s", problem)
        return None

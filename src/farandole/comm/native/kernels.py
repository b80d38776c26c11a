"""The library of native loops: loaded, with the types of their arguments. `kernels.c` says what each computes.

Loops get an address and a count, and would write beyond the end of anything else: who calls one looks before at
what it is given. A tensor is contiguous, in CPU memory, and float32 unless said otherwise. A call releases the
interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ...core.environ.env import native_loops_are_wanted
from .build import Unusable, load_library

Format = Literal["int8", "int4", "bf16", "fp16"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "bf16", "fp16")
LARGEST_BLOCK = 1024
"""Elements; TILE in `kernels.c`."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_log = logging.getLogger("farandole")


class Loops(NamedTuple):
    """The functions of one format; `kernels.c` says what their arguments are."""

    encode: Callable[..., None]
    add_up: Callable[..., None]
    land: Callable[..., int]


class Kernels:
    """The library's functions, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise `AttributeError` when a function is missing."""

        def function(name: str, *arguments: type[ctypes.c_void_p | ctypes.c_int64]) -> Any:
            found = library[f"farandole_{name}"]
            found.argtypes, found.restype = arguments, _COUNT if name.startswith("land_") else None
            return found

        each = (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT)
        pieces = (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _POINTER, _COUNT, _COUNT)
        self.of_format: dict[Format, Loops] = {
            name: Loops(
                function(f"encode_{name}", *each),
                function(f"add_up_{name}", *pieces),
                function(f"land_{name}", *each),
            )
            for name in FORMATS
        }
        self._sum_rows = function("sum_rows", _POINTER, _COUNT, _COUNT, _COUNT)

    def row_sum(self, parts: Sequence[torch.Tensor]) -> Callable[[int], None]:
        """Return what adds `parts`, two or more, in their order and writes the sum into the first n of them."""
        if len(parts) < 2:
            raise ValueError(f"the sum of {len(parts)} rows: expected two or more")
        _require_floats(parts)
        pointers = (_POINTER * len(parts))(*(part.data_ptr() for part in parts))
        rows, elements, kept = len(parts), parts[0].numel(), list(parts)

        def add_up(targets: int) -> None:
            if not 0 <= targets <= len(kept):  # which also keeps the memory alive that the pointers are of
                raise ValueError(f"the sum of {len(kept)} rows into {targets} of them")
            self._sum_rows(pointers, rows, targets, elements)

        return add_up


def _require_floats(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` for tensors that are not contiguous float32 in CPU memory, or of unequal length."""
    count = tensors[0].numel()
    for tensor in tensors:
        if not (
            tensor.is_cpu
            and tensor.dtype == torch.float32
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and tensor.numel() == count
        ):
            strides = f" and strides {tensor.stride()}" if tensor.layout == torch.strided else ""
            raise ValueError(
                f"native loops: {tensor.dtype} of shape {tuple(tensor.shape)}{strides} on {tensor.device.type}, "
                f"expected {count} contiguous float32 numbers on cpu"
            )


def loops() -> Kernels | None:
    """Return the loops; None where FARANDOLE_NATIVE is 0 or none can be made. The first call may take seconds."""
    return _load() if native_loops_are_wanted() else None


@cache
def _load() -> Kernels | None:
    try:
        return Kernels(load_library(Path(__file__).with_name("kernels.c")))
    except (Unusable, AttributeError) as problem:
        _log.debug("no native loops: %s", problem)
        return None

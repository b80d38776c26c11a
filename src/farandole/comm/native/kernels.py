"""The native loops as methods on tensors. `kernels.c` says what each computes.

A tensor here is contiguous, in CPU memory, and float32 unless said otherwise. Loops get an address and
a count, and would write beyond the end of anything else: what does not fit is a `ValueError` before it is touched.
A call releases the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import torch

from ...core.environ.env import native_loops_are_wanted
from ...core.vocabulary.codec_spec import CodecSpec, PackedFormat
from .build import Unusable, load_library

Format = Literal["int8", "int4", "bf16", "fp16"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "bf16", "fp16")
LARGEST_BLOCK = 1024
"""Elements; TILE in `kernels.c`."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_log = logging.getLogger("farandole")


class Kernels:
    """The library's functions, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise `AttributeError` when a function is missing."""

        def function(name: str, *arguments: type[ctypes.c_void_p | ctypes.c_int64]) -> Callable[..., int | None]:
            found = library[f"farandole_{name}"]
            found.argtypes, found.restype = arguments, _COUNT if name.startswith("land_") else None
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
        _require_floats(values, residual)
        _require_packed(how, packed, values.numel(), block)
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
        _require_floats(values, residual)
        _require_packed(how, packed, values.numel(), block)
        _require_pieces(how, pieces, values.numel(), block=block, mine=mine)
        self._add_up[how](
            values.data_ptr(), residual.data_ptr(), pieces.data_ptr(), pieces.stride(0), mine, pieces.shape[0],
            packed.data_ptr(), values.numel(), block,
        )  # fmt: skip

    def land(
        self, how: Format, packed: torch.Tensor, values: torch.Tensor, residual: torch.Tensor, *, block: int
    ) -> bool:
        """Move `values` to `residual`, and write what `packed` (uint8) stands for in their place.

        Return whether that holds no NaN and no infinity.
        """
        _require_floats(values, residual)
        _require_packed(how, packed, values.numel(), block)
        return bool(
            self._land[how](packed.data_ptr(), values.data_ptr(), residual.data_ptr(), values.numel(), block)
        )

    def row_sum(self, parts: Sequence[torch.Tensor]) -> Callable[[int], None]:
        """Return what adds `parts`, two or more, in their order and writes the sum into the first n of them."""
        if len(parts) < 2:
            raise ValueError(f"the sum of {len(parts)} rows: expected two or more")
        _require_floats(*parts)
        pointers = (_POINTER * len(parts))(*(part.data_ptr() for part in parts))
        rows, elements, kept = len(parts), parts[0].numel(), list(parts)

        def add_up(targets: int) -> None:
            if not 0 <= targets <= len(kept):  # which also keeps the memory alive that the pointers are of
                raise ValueError(f"the sum of {len(kept)} rows into {targets} of them")
            self._sum_rows(pointers, rows, targets, elements)

        return add_up


def _require_floats(*tensors: torch.Tensor) -> None:
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
            raise ValueError(
                f"native loops: {_describe(tensor)}, expected {count} contiguous float32 numbers on cpu"
            )


def _require_packed(how: Format, packed: torch.Tensor, count: int, block: int) -> None:
    """Raise `ValueError` unless `count` numbers are whole blocks, for which `packed` has room."""
    if not 0 < block <= LARGEST_BLOCK or count % block or block * _packed_format(how, block).bits % 8:
        raise ValueError(
            f"native loops: {count} numbers in blocks of {block}, expected whole ones of at most {LARGEST_BLOCK}"
        )
    least = packed_bytes(how, count, block)
    if not (packed.is_cpu and packed.dtype == torch.uint8 and packed.is_contiguous() and packed.numel() >= least):
        raise ValueError(f"native loops: {_describe(packed)}, expected {least} contiguous bytes (uint8) on cpu")


def _require_pieces(how: Format, pieces: torch.Tensor, count: int, *, block: int, mine: int) -> None:
    """Raise `ValueError` unless every row of `pieces` holds `count` packed numbers, and one of them is `mine`."""
    least = packed_bytes(how, count, block)
    fits = pieces.is_cpu and pieces.dtype == torch.uint8 and pieces.dim() == 2 and pieces.stride(1) == 1
    if not (fits and pieces.shape[1] >= least and 0 <= mine < pieces.shape[0]):
        raise ValueError(
            f"native loops: {_describe(pieces)}, of which row {mine} is this rank's, "
            f"expected rows of {least} bytes (uint8) on cpu"
        )


@cache
def _packed_format(how: Format, block: int) -> PackedFormat:
    packed = CodecSpec.parse(how).packed_format
    assert packed is not None, "formats are those of quantized codecs"
    return replace(packed, block=block)


@lru_cache(maxsize=1024)  # called for every row of every segment, mostly with a few values
def packed_bytes(how: Format, count: int, block: int) -> int:
    """Return the bytes of `count` packed numbers, whole blocks."""
    return _packed_format(how, block).packed_bytes(count)


def _describe(tensor: torch.Tensor) -> str:
    strides = f" and strides {tensor.stride()}" if tensor.layout == torch.strided else ""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{strides} on {tensor.device.type}"


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

"""Launches the kernels of `block_kernels`, on the current stream: where they can run, and over which grid.

Kernels get addresses and lengths and would write beyond the end of anything else: who calls one looks before at
what it is given. Tensors are contiguous and on one device; units and residuals are 1-D float32 of one length, and
packed rows are uint8: scales, then numbers, as `packing.Integers` writes them.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import torch

LARGEST_BLOCK = 4096
"""Elements: a program holds whole blocks in registers."""
MOST_BYTES = 2**31 - 1
"""The most elements of a unit, and bytes of all packed rows: kernels count in int32."""
_PROGRAM_ELEMENTS = 2048
_log = logging.getLogger("farandole")


@dataclass(frozen=True)
class BlockKernels:
    """The kernels of one format."""

    bits: int
    """8 or 4."""
    block: int
    """Elements of a scale: a power of two of at most `LARGEST_BLOCK`."""

    def encode(
        self, unit: torch.Tensor, residual: torch.Tensor, next_residual: torch.Tensor, packed: torch.Tensor,
        *, own_row: int,
    ) -> None:  # fmt: skip
        """Pack `unit` + `residual` into all rows of `packed` (ranks, bytes) but `own_row`."""
        kernel = self._kernels.encode[self._grid(packed)]
        with _current(unit.device):
            kernel(
                unit, residual, next_residual, *self._parts(packed), own_row, self._piece(packed), unit.numel(),
                *_strides(packed), **self._format, top=self._top, **_EXACT,
            )  # fmt: skip

    def add_up(
        self, unit: torch.Tensor, residual: torch.Tensor, next_residual: torch.Tensor, pieces: torch.Tensor,
        summary: torch.Tensor, *, own_row: int,
    ) -> None:  # fmt: skip
        """Pack into `summary` (bytes,) the mean of this rank's piece; the other ranks' are rows of `pieces`."""
        kernel = self._kernels.add_up[self._grid(summary)]
        with _current(unit.device):
            kernel(
                unit, residual, next_residual, *self._parts(pieces), *self._parts(summary), own_row,
                self._piece(summary), unit.numel(), *_strides(pieces), **self._format, ranks=len(pieces),
                top=self._top, **_EXACT,
            )  # fmt: skip

    def land(self, unit: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
        """Unpack the mean, `summaries` (ranks, bytes), into `unit`; return whether it is finite, () of bool."""
        is_finite = torch.ones((), dtype=torch.bool, device=unit.device)
        kernel = self._kernels.land[self._grid(summaries)]
        with _current(unit.device):
            kernel(
                unit, is_finite.view(torch.int8), *self._parts(summaries), self._piece(summaries), unit.numel(),
                *_strides(summaries), **self._format, top=self._top, **_EXACT,
            )  # fmt: skip
        return is_finite

    @cached_property
    def _kernels(self) -> Any:
        kernels = load_kernels()
        assert kernels is not None, "asked before by `can_run`"
        return kernels

    @property
    def halves(self) -> int:
        """Parts of a piece that share bytes. See [Note: halves of a piece] in `block_kernels`."""
        return 8 // self.bits

    @property
    def _top(self) -> float:
        return float((1 << (self.bits - 1)) - 1)

    @property
    def _format(self) -> dict[str, int]:
        return {"halves": self.halves, "block": self.block, "tile": self._tile}

    @property
    def _tile(self) -> int:
        return max(1, _PROGRAM_ELEMENTS // self.block)

    def _piece(self, packed: torch.Tensor) -> int:
        """Return the numbers that a row stands for."""
        return packed.shape[-1] // (self.block * self.bits // 8 + 4) * self.block

    def _grid(self, packed: torch.Tensor) -> tuple[int, int]:
        rows = 1 if packed.dim() == 1 else len(packed)
        return -(-self._piece(packed) // (self.block * self.halves * self._tile)), rows

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the scales and the numbers of the first row begin."""
        scale_bytes = 4 * (self._piece(packed) // self.block)
        return packed.view(torch.float32), packed.view(torch.int8).view(-1)[scale_bytes:]


_EXACT = {"enable_fp_fusion": False}


def _strides(packed: torch.Tensor) -> tuple[int, int]:
    """Return the float32 words and the bytes from one row to the next."""
    return packed.shape[-1] // 4, packed.shape[-1]


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on `device`: Triton takes the current one."""
    return nullcontext() if device.index is None else torch.accelerator.device_index(device.index)


@cache
def load_kernels() -> ModuleType | None:
    """Return the kernels; None where Triton is not installed. The first call may take a second."""
    try:
        from . import block_kernels
    except Exception as problem:  # what is installed may be broken in any way
        _log.debug("no Triton kernels: %s: %s", type(problem).__name__, problem)
        return None
    return block_kernels


@cache
def can_run(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for `device`; on the CPU its interpreter runs kernels."""
    kernels = load_kernels()
    if kernels is None:
        return False
    import triton

    if not isinstance(kernels.land, triton.runtime.JITFunction):
        return device.type == "cpu"
    try:
        return bool(triton.runtime.driver.active.get_active_torch_device().type == device.type)
    except Exception as problem:  # no device that it knows, and errors of its drivers
        _log.debug("no Triton kernels on %s: %s: %s", device, type(problem).__name__, problem)
        return False

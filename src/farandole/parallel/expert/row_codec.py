"""Rows of activations as bytes for the all-to-all: as they are, in bfloat16, or in 8 bits with a scale a row.

A row that is not finite arrives with values that are not finite, whatever the codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import torch

from ...core.vocabulary.codec_spec import NONE

_SCALE_BYTES = 4


class RowCodec(Protocol):
    """How rows (n, width) of a floating type travel, each by itself."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """Return memory for what `pack` makes of rows as many and as wide as `rows`, of their type."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows` as they travel: (n, anything)."""

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows that `packed` was made of, in `dtype`."""


class ExactRows:
    """As they are."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return rows

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return rows.contiguous()

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `RowCodec`."""
        return packed.to(dtype)


class HalfRows:
    """In bfloat16; rows of 16 bits stay as they are."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return torch.empty_like(rows, dtype=torch.bfloat16 if rows.dtype.itemsize > 2 else rows.dtype)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return (rows.to(torch.bfloat16) if rows.dtype.itemsize > 2 else rows).contiguous()

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `RowCodec`."""
        return packed.to(dtype)


class ByteRows:
    """In 8 bits an element, as multiples of 1/127 of the row's largest absolute value, a float32 at its end."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return torch.empty(rows.shape[0], rows.shape[1] + _SCALE_BYTES, dtype=torch.uint8, device=rows.device)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        if not rows.numel():
            return self.room(rows)
        exact = rows.to(torch.float32)
        scales = exact.abs().amax(1, keepdim=True) / 127
        divisors = torch.where(scales > 0, scales, 1.0)
        levels = (exact / divisors).round_().nan_to_num_(0.0).to(torch.int8)
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        return torch.cat([levels.view(torch.uint8), scales.contiguous().view(torch.uint8)], 1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `RowCodec`."""
        if not packed.shape[0]:
            return torch.empty(0, packed.shape[1] - _SCALE_BYTES, dtype=dtype, device=packed.device)
        levels = packed[:, :-_SCALE_BYTES].contiguous().view(torch.int8)
        scales = packed[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        return (levels.to(torch.float32) * scales).to(dtype)


ROW_CODECS: Final[Mapping[str, RowCodec]] = {NONE: ExactRows(), "bf16": HalfRows(), "int8": ByteRows()}
"""By the values of the plan's key `expert_codec`."""

"""Weights that are stored in few bits, decoded without torch: the form of `parallel.frozen.block_codes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import tensor_bytes
from .manifest import PieceEntry, TensorEntry


@dataclass(frozen=True, slots=True)
class FrozenEntry:
    """A tensor that a checkpoint stores as packed numbers and scales, and an export as float32."""

    codec: str
    shape: tuple[int, ...]
    packed: TensorEntry
    scales: TensorEntry
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Size of the decoded tensor."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def pieces(self) -> tuple[PieceEntry, ...]:
        """Those of both tensors."""
        return (*self.packed.pieces, *self.scales.pieces)


def frozen_entry(value: Any, tensors: Mapping[str, TensorEntry]) -> FrozenEntry | None:
    """Return what an encoded value says of a frozen weight; None if it is something else."""
    body = value.get("$frozen") if isinstance(value, dict) else None
    try:
        packed, scales = (tensors[body[key]["$tensor"]] for key in ("packed", "scales"))  # type: ignore[index]
        return FrozenEntry(body["codec"], tuple(body["shape"]), packed, scales)  # type: ignore[index]
    except (KeyError, TypeError):
        return None


def decode_frozen(entry: FrozenEntry, packed: bytes, scales: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the elements, float32, of the content of both tensors."""
    blocks = entry.packed.shape[0]
    if entry.scales.dtype == "bfloat16":
        factors = (np.frombuffer(scales, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        factors = np.frombuffer(scales, np.float32)
    if entry.packed.dtype == "uint8":
        pairs = np.frombuffer(packed, np.uint8).reshape(blocks, -1)
        numbers = np.stack((pairs & 15, pairs >> 4), 2).reshape(blocks, -1).astype(np.float32) - np.float32(8)
    else:
        numbers = np.frombuffer(packed, np.int8).reshape(blocks, -1).astype(np.float32)
    flat = (numbers * factors[:, None]).reshape(-1)
    return flat[: int(np.prod(entry.shape, dtype=np.int64))].reshape(entry.shape)

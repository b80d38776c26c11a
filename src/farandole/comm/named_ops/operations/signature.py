"""The signature of a named operation, which its members compare, and its encoding.

A signature is sent once to each peer and given a number there; from then on the number stands for it. See
[Note: numbers] in `numbers`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

from ....core.vocabulary.codec_spec import NONE

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
"""Types that can travel, by name."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Signature(NamedTuple):
    """One rank's view of an operation: all but the numbers in its tensor."""

    name: str
    process_set: int
    """Serial number of the set; never used again after it was removed."""
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    reduction: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    """Rows for each member (alltoall); the ranks of a set that is to be added."""
    codec: str = NONE
    device: str = "cpu"
    group: tuple[str, ...] = ()
    """Names of all operations that run together with this one, or none of them; empty: it is alone."""
    chosen_with: str = ""
    """See `Request`; empty for codecs that are not chosen."""

    @property
    def key(self) -> tuple[int, str]:
        """What must be equal for operations to meet."""
        return self.process_set, self.name

    @property
    def is_exact(self) -> bool:
        """Whether no codec changes what is sent."""
        return self.codec == NONE

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the first dimension."""
        row = DTYPES[self.dtype].itemsize
        for length in self.shape[1:]:
            row *= length
        return row

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        if not self.dtype:
            return 0
        return self.row_bytes * self.shape[0] if self.shape else self.row_bytes

    def encode(self) -> bytes:
        """Return what `decode` reads."""
        return json.dumps(self, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Signature:
        """Read a signature that a peer sent; raise `ValueError` for anything else."""
        told: Any = json.loads(data)
        if not isinstance(told, list) or len(told) != len(cls._fields):
            raise ValueError(f"not a signature: {data[:80]!r}")
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in told]
        return cls(*values)

"""Types of tensors: the names in a manifest are torch's, those in the files are safetensors'."""

from __future__ import annotations

import math

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4,
    "uint32": 4, "float32": 4, "complex32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""torch's names of the types that a checkpoint may have, and the bytes of an element."""

_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16",
    "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def file_layout(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return safetensors' type and shape for a tensor; one of a type it does not know is stored as bytes."""
    if dtype in _SAFETENSORS:
        return _SAFETENSORS[dtype], shape
    return "U8", (*shape, ITEM_BYTES[dtype])


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def dtype_of_safetensors(kind: object) -> str | None:
    """Return torch's name of a type of safetensors; None for one that a checkpoint cannot have."""
    return next((dtype for dtype, name in _SAFETENSORS.items() if name == kind), None)

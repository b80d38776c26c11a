"""Arrays of a training: hashes of them, and nests of lists, tuples and dicts that they lie in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def leaves_of(nest: Any) -> list[Any]:
    """Return what lies in a nest, in a fixed order. None is no leaf."""
    if nest is None:
        return []
    if isinstance(nest, Mapping):
        return [leaf for key in sorted(nest, key=str) for leaf in leaves_of(nest[key])]
    if isinstance(nest, (list, tuple)):
        return [leaf for each in nest for leaf in leaves_of(each)]
    return [nest]


def replaced(nest: Any, leaves: Iterator[Any]) -> Any:
    """Return a nest like `nest` with other leaves, in the order of `leaves_of`."""
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        made = {key: replaced(nest[key], leaves) for key in sorted(nest, key=str)}
        return {key: made[key] for key in nest}
    if isinstance(nest, (list, tuple)):
        parts = [replaced(each, leaves) for each in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return next(leaves)


def digest_of(arrays: Iterable[Array], most: int | None = None) -> str:
    """Return a hash of the shapes, types and values of arrays; of each at most the first `most` elements."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}".encode())
        flat = np.ascontiguousarray(array.reshape(-1)[:most])
        digest.update(repr(flat.tolist()).encode() if array.dtype == object else flat.tobytes())
    return digest.hexdigest()[:32]


def as_torch(array: Array) -> torch.Tensor:
    """Return an array as a tensor of integers with the same bits: torch does not have all types of NumPy."""
    kind = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}.get(array.dtype.itemsize, np.uint8)
    return torch.from_numpy(np.frombuffer(array.tobytes(), dtype=kind).copy())


def unique_labels(labels: Sequence[str]) -> list[str]:
    """Return labels of which no two are equal: names of variables may be."""
    seen: dict[str, int] = {}
    found = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        found.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return found

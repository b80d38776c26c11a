"""Ids on the wire: ascending, as differences in the narrowest integer that holds them; counts likewise."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.vocabulary.errors import ConfigError

_WIDTHS = (np.uint8, np.int16, np.int32, np.int64)


def pack_numbers(numbers: NDArray[np.int64]) -> torch.Tensor:
    """Return numbers of at least 0, (u,), in the narrowest of uint8, int16, int32 and int64."""
    most = int(numbers.max()) if len(numbers) else 0
    width = next(each for each in _WIDTHS if most <= np.iinfo(each).max)
    return torch.from_numpy(numbers.astype(width))


def pack_ids(ids: NDArray[np.int64]) -> tuple[int, torch.Tensor]:
    """Return the first of ascending ids, and by how much each exceeds the one before (the first: 0)."""
    if not len(ids):
        return 0, pack_numbers(ids)
    return int(ids[0]), pack_numbers(np.diff(ids, prepend=ids[0]))


def unpack_ids(first: int, steps: torch.Tensor) -> NDArray[np.int64]:
    """Return what `pack_ids` was given. Raises `ConfigError` for ids that do not ascend from 0."""
    ids = first + np.cumsum(steps.numpy().astype(np.int64))
    if len(ids) and (ids[0] < 0 or (np.diff(ids) <= 0).any()):
        raise ConfigError(f"{len(ids)} ids from {first} on do not ascend, or are below 0")
    return ids

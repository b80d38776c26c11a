"""Ids of a script, and on the wire: ascending, as differences in the narrowest integer that has them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.vocabulary.errors import ConfigError

_WIDTHS = (np.uint8, np.int16, np.int32, np.int64)


def read_ids(ids: torch.Tensor, owner: str) -> NDArray[np.int64]:
    """Return ids of any shape and device as (ids,). Raises `ConfigError` for what are no integers from 0 on."""
    is_tensor = isinstance(ids, torch.Tensor)
    if not is_tensor or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = str(ids.dtype) if is_tensor else type(ids).__name__
        raise ConfigError(f"{owner}: ids of {kind}, expected a tensor of int64", remedy="torch.as_tensor(ids)")
    flat: NDArray[np.int64] = ids.detach().reshape(-1).cpu().long().numpy()
    if len(flat) and flat.min() < 0:
        raise ConfigError(
            f"{owner}: id {flat.min()}, expected ids from 0 to 2**63 - 1",
            remedy="map hashes to 63 bits: ids & (2**63 - 1)",
        )
    return flat


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

"""What follows from an id alone: the server that has its row, and the row's first values.

Both are functions of (seed, name of the table, id), so that they depend on no order, rank or number of servers.
The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014); owners are by rendezvous hashing (Thaler and
Ravishankar 1998): with one more server of K + 1, 1 / (K + 1) of the rows move, all to the new one.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_ROWS_AT_ONCE: Final = 8192
"""Rows that are made together: they fit the cache of a CPU."""


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well mixed 64 bits of each of `values`, a bijection."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def key_of(name: str, seed: int) -> int:
    """Return 64 bits that stand for a table and a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def owners(ids: NDArray[np.int64], key: int, servers: int) -> NDArray[np.int64]:
    """Return by id, (u,), the number of the server that has its row. `key`: of the name alone, see `key_of`."""
    best, owner = np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.int64)
    if servers == 1:
        return owner
    bits = ids.astype(np.uint64)
    for server in range(servers):
        score = mix(bits ^ np.uint64(_scalar_mix(key + server * _GOLDEN)))
        higher = score > best
        owner[higher], best[higher] = server, score[higher]
    return owner


def initial_rows(ids: NDArray[np.int64], key: int, dim: int, std: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the first values, (u, dim), of the rows of `ids`: uniform, of mean 0 and standard deviation `std`.

    They are multiples of 2**-32 times a constant, so that they are the same on each machine; float32 rounds them.
    """
    if not std or not len(ids):
        return torch.zeros(len(ids), dim, dtype=dtype)
    pairs = -(-dim // 2)
    columns = np.array([(each + 1) * _GOLDEN & _MASK for each in range(pairs)], np.uint64)
    made = torch.empty(len(ids), dim, dtype=dtype)
    scale = std * 3**0.5
    for begin in range(0, len(ids), _ROWS_AT_ONCE):
        rows = mix(ids[begin : begin + _ROWS_AT_ONCE].astype(np.uint64) ^ np.uint64(key))
        halves = mix(rows[:, None] + columns).view(np.uint32)[:, :dim]
        uniform = (halves.astype(np.float64) + 0.5) * 2.0**-31 - 1.0
        made[begin : begin + _ROWS_AT_ONCE] = torch.from_numpy(uniform * scale)
    return made


def _scalar_mix(value: int) -> int:
    return int(mix(np.array([value & _MASK], np.uint64))[0])

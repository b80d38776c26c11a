"""Rows in memory: ids, values, optimizer states, and when each was used and changed. No rule of its own.

All ids of a batch are looked up together, one probe at a time: a Python object for each id would cost a hundred
times as much.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.vocabulary.errors import ConfigError

# What follows from an id alone: the server that has its row, and the row's first values.
#
# Both are functions of (seed, name of the table, id), so that they depend on no order, rank or number of
# servers. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014); owners are by rendezvous hashing
# (Thaler and Ravishankar 1998): with one more server of K + 1, 1 / (K + 1) of the rows move, all to the new one.

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


# Ids of a script, and on the wire: ascending, as differences in the narrowest integer that has them.

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


# Which place has the row of an id: a hash table in two arrays, open addressing with linear probing.
ABSENT: Final = -1
_EMPTY: Final = -1
"""No id: ids are at least 0."""
_LEAST_SLOTS: Final = 1024


class IdIndex:
    """Places by id. At most half of its slots are taken."""

    def __init__(self, ids: NDArray[np.int64] | None = None) -> None:
        """Give each of `ids`, which differ, its position as place."""
        self._count = 0
        self._reserve(_LEAST_SLOTS)
        if ids is not None and len(ids):
            self.add(ids, np.arange(len(ids)))

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._count

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each id, (u,); `ABSENT` where it has none."""
        slots = self._first_slots(ids)
        keys = self._keys[slots]
        places = np.where(keys == ids, self._places[slots], ABSENT)
        pending = np.flatnonzero((keys != ids) & (keys != _EMPTY))
        while pending.size:
            slots[pending] = (slots[pending] + 1) & self._mask
            keys = self._keys[slots[pending]]
            hits = keys == ids[pending]
            places[pending[hits]] = self._places[slots[pending[hits]]]
            pending = pending[~hits & (keys != _EMPTY)]
        return places

    def add(self, ids: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Give `ids`, which differ and are absent, their places."""
        total = self._count + len(ids)
        if 2 * total > len(self._keys):
            old = self._keys != _EMPTY
            kept_ids, kept_places = self._keys[old], self._places[old]
            self._reserve(1 << (4 * total - 1).bit_length())
            self._put(kept_ids, kept_places)
        self._put(ids, places)
        self._count = total

    def _reserve(self, slots: int) -> None:
        self._keys = np.full(slots, _EMPTY, np.int64)
        self._places = np.zeros(slots, np.int64)
        self._mask = slots - 1

    def _first_slots(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return (mix(ids.astype(np.uint64)) & np.uint64(self._mask)).astype(np.int64)

    def _put(self, ids: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        slots = self._first_slots(ids)
        pending = np.arange(len(ids))
        while pending.size:
            free = self._keys[slots[pending]] == _EMPTY
            claims = pending[free]
            self._keys[slots[claims]] = ids[claims]  # of several for one slot the last one gets it
            won = self._keys[slots[claims]] == ids[claims]
            self._places[slots[claims[won]]] = places[claims[won]]
            pending = np.concatenate([pending[~free], claims[~won]])
            slots[pending] = (slots[pending] + 1) & self._mask


_LEAST_ROWS = 256


class RowStore:
    """Rows in the order in which they were added. Places are valid until `keep`."""

    def __init__(self, dim: int, state_width: int, dtype: torch.dtype) -> None:
        self._index = IdIndex()
        self._count = 0
        self._values = torch.empty(0, dim, dtype=dtype)
        self._states = torch.empty(0, state_width, dtype=dtype)
        self._ids = np.empty(0, np.int64)
        self._used, self._touched = np.empty(0, np.float64), np.empty(0, np.int64)
        self.layout = 0
        """How often rows have moved."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    @property
    def ids(self) -> NDArray[np.int64]:
        """(rows,)."""
        return self._ids[: self._count]

    @property
    def values(self) -> torch.Tensor:
        """(rows, dim)."""
        return self._values[: self._count]

    @property
    def states(self) -> torch.Tensor:
        """(rows, state_width)."""
        return self._states[: self._count]

    @property
    def used(self) -> NDArray[np.float64]:
        """(rows,): when each was last trained, in seconds since 1970."""
        return self._used[: self._count]

    @property
    def touched(self) -> NDArray[np.int64]:
        """(rows,): the version of the shard in which each last changed."""
        return self._touched[: self._count]

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return places, (u,); `index.ABSENT` where there is no row."""
        return self._index.find(ids)

    def add(self, ids: NDArray[np.int64], values: torch.Tensor, states: torch.Tensor | None) -> NDArray[np.int64]:
        """Add rows of `ids`, which differ and are absent; return their places. `states`: None for zeros."""
        begin, end = self._count, self._count + len(ids)
        if end > len(self._ids):
            self._grow(max(2 * len(self._ids), end, _LEAST_ROWS))
        self._count = end
        places = np.arange(begin, end)
        self._index.add(ids, places)
        self._ids[begin:end] = ids
        self._values[begin:end] = values
        self._states[begin:end] = 0 if states is None else states
        self._used[begin:end] = self._touched[begin:end] = 0
        return places

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the rows whose entry, (rows,), is false."""
        places = np.flatnonzero(kept)
        at = torch.from_numpy(places)
        self._values, self._states = self.values[at], self.states[at]
        self._ids, self._used, self._touched = self.ids[places], self.used[places], self.touched[places]
        self._count = len(places)
        self._index = IdIndex(self._ids)
        self.layout += 1

    def _grow(self, rows: int) -> None:
        for name in ("_values", "_states"):
            old = getattr(self, name)
            made = torch.empty(rows, old.shape[1], dtype=old.dtype)
            made[: self._count] = old[: self._count]
            setattr(self, name, made)
        for name in ("_ids", "_used", "_touched"):
            grown = np.empty(rows, getattr(self, name).dtype)
            grown[: self._count] = getattr(self, name)[: self._count]
            setattr(self, name, grown)

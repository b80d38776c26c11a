"""Rows in memory: ids, values, optimizer states, and when each was used and changed. No rule of its own.

All ids of a batch are looked up together, one probe at a time: a Python object for each id would cost a hundred
times as much.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from .hashing import mix

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

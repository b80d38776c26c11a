"""Which place has the row of an id: a hash table in two arrays, open addressing with linear probing.

All ids of a batch are looked up together, one probe at a time: a Python object for each id would cost a hundred
times as much.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .hashing import mix

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

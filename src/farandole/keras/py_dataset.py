"""A `keras.utils.PyDataset`, divided. See [Note: the job's batches] and [Note: weights] in `sharding`.

A rank asks for its own batches only, and for those of the last step of the job, which is put together and cut
anew on each rank if it is not full.

[Note: the order] Data sets shuffle in `on_epoch_end`, most by the global generators of NumPy or Python, which
differ between ranks: samples would be lost and doubled. So it runs with these generators seeded alike on all
ranks, by rank 0's seed and the epoch, and they are put back after it. What was shuffled before `shard` is compared
by the first batch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from ..comm.world.store_sync import all_gather_json, require_equal
from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError
from ..train.data.partition import Partition


def shard_py_dataset(dataset: Any, here: World, *, split: bool, evaluate: bool) -> Any:
    """Return this rank's share."""
    if isinstance(dataset, ShardedPyDataset):
        raise ConfigError("shard: the data set is sharded already", remedy="give the plain one")
    if dataset.num_batches is None:
        raise ConfigError(
            "shard: the PyDataset has no number of batches", remedy="give it a __len__, or use a tf.data.Dataset"
        )
    if not dataset.num_batches:
        raise ConfigError("shard: the PyDataset has no batches", remedy="give it some")
    if here.size == 1:
        return dataset
    seed = int(all_gather_json(here, "seed of farandole.keras.shard", _seed_of_numpy())[0])
    _require_same_order(dataset, here, seed)
    return ShardedPyDataset(dataset, here.rank, here.size, seed, split=split, evaluate=evaluate)


def _seed_of_numpy() -> int:
    """Return what NumPy's global generator was seeded with: scripts seed it, and a run shall be reproducible."""
    state: Any = np.random.get_state()
    return int(state[1][0])


class ShardedPyDataset(keras.utils.PyDataset):  # type: ignore[misc] # its class is not known where Keras is missing
    """One rank's share of a PyDataset."""

    def __init__(self, source: Any, rank: int, size: int, seed: int, *, split: bool, evaluate: bool) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self.source = source
        self._seed, self._epoch = seed, 0
        self._in_a_step = 1 if split else size
        self._partition = Partition(rank, size, 0)
        self._evaluate = evaluate
        batches = source.num_batches
        self._full, last = rows_of(source[0]), rows_of(source[batches - 1])
        in_last_step = (batches - 1) % self._in_a_step * self._full + last
        self._last_is_whole = in_last_step == self._full * self._in_a_step
        if split and self._full < size:
            raise ConfigError(
                f"shard: a batch of {self._full} cannot be split over {size} ranks",
                remedy=f"use a batch of at least {size}",
            )
        uneven = in_last_step % size or (split and self._full % size)
        self._adds_weights = bool(uneven) and not evaluate
        self._steps: int = -(-batches // self._in_a_step)
        if evaluate and not self._partition.cut(0, in_last_step):
            self._steps -= 1
        self._latest = -1
        if self._adds_weights:
            weighted(source[0], 1.0)  # refuses elements without a place for weights

    @property
    def num_batches(self) -> int:
        """Steps of an epoch on this rank."""
        return self._steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        """Return this rank's part of one step of the job."""
        if not 0 <= index < self._steps:
            raise IndexError(f"step {index} of {self._steps}")
        self._refuse_shuffled(index)
        is_last = index == -(-self.source.num_batches // self._in_a_step) - 1
        first = index * self._in_a_step
        if self._in_a_step > 1 and (not is_last or self._last_is_whole):
            number = first + self._partition.rank
            batch = self.source[number]
            if rows_of(batch) != self._full:
                raise ConfigError(
                    f"shard: batch {number} of the PyDataset has {rows_of(batch)} samples and the first one "
                    f"{self._full}; only the last may be smaller",
                    remedy="give batches of one size",
                )
            return weighted(batch, 1.0) if self._adds_weights else batch
        numbers = range(first, min(first + self._in_a_step, self.source.num_batches))
        return self._cut(joined([self.source[i] for i in numbers]))

    def on_epoch_begin(self) -> None:
        """See `keras.utils.PyDataset`."""
        with same_random_numbers(self._seed, 2 * self._epoch):
            self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """See [Note: the order]."""
        with same_random_numbers(self._seed, 2 * self._epoch + 1):
            self.source.on_epoch_end()
        self._epoch += 1
        self._latest = -1

    def _cut(self, batch: Any) -> Any:
        count = rows_of(batch)
        own = self._partition.cut(0, count)
        taken = own if own or self._evaluate else range(1)  # a placeholder
        part = map_rows(lambda rows: rows[taken.start : taken.stop], batch)
        return weighted(part, len(own) * self._partition.size / count) if self._adds_weights else part

    def _refuse_shuffled(self, index: int) -> None:
        """Raise where `fit` shuffles the steps, on each rank in another order: the last one must be the last."""
        ahead = self.max_queue_size + self.workers if self.workers > 1 or self.use_multiprocessing else 0
        if self._adds_weights and index > max(self._latest, 0) + 1 + ahead:
            raise ConfigError(
                f"shard: step {index} of the PyDataset is asked for after step {self._latest}: fit shuffles the "
                "steps, on each rank in another order",
                remedy="fit(..., shuffle=False), and shuffle in on_epoch_end",
            )
        self._latest = 0 if index == 0 else max(self._latest, index)


@contextmanager
def same_random_numbers(seed: int, number: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy by `seed` and `number`, and put them back at the end."""
    python, arrays = random.getstate(), np.random.get_state()
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")
    try:
        random.seed(mixed)
        np.random.seed(mixed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _require_same_order(dataset: Any, here: World, seed: int) -> None:
    """Raise Mismatch where ranks have other first batches. Batches that differ each time are not compared."""
    digests = []
    for _ in range(2):
        with same_random_numbers(seed, 0):
            digests.append(digest_of(dataset[0]))
    told = all_gather_json(
        here, "first batch of farandole.keras.shard", digests[0] if len(set(digests)) == 1 else ""
    )
    if all(told):
        require_equal(
            here, "farandole.keras.shard", "the first batch (as a hash)", told,
            remedy="make the same data set in the same order on all ranks: seed NumPy and Python alike before "
            "that, or shuffle in on_epoch_end only",
        )  # fmt: skip


def digest_of(batch: Any) -> str:
    """Return a hash of all that is in a batch."""
    found = hashlib.sha256()
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            array = np.ascontiguousarray(keras.ops.convert_to_numpy(leaf))
            found.update(f"{array.dtype}{array.shape}".encode())
            found.update(array.tobytes())
    return found.hexdigest()[:16]


def rows_of(batch: Any) -> int:
    """Return the number of samples of a batch."""
    for leaf in keras.tree.flatten(batch):
        shape: Any = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    raise ConfigError(
        f"shard: a batch of the PyDataset has no arrays: {type(batch).__name__}",
        remedy="return (inputs, targets) as arrays with one row for each sample",
    )


def map_rows(function: Any, *batches: Any) -> Any:
    """Apply `function` to the arrays of batches; None stays."""
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else function(*leaves), *batches)


def joined(batches: list[Any]) -> Any:
    """Return one batch of all rows."""
    if len(batches) == 1:
        return batches[0]
    return map_rows(lambda *rows: np.concatenate([keras.ops.convert_to_numpy(each) for each in rows]), *batches)


def weighted(batch: Any, factor: float) -> Any:
    """Return inputs, targets and sample weights."""
    if not isinstance(batch, (tuple, list)) or len(batch) not in {2, 3}:
        raise ConfigError(
            "shard: parts of a batch may differ in size, so samples need weights, and the PyDataset returns "
            f"{type(batch).__name__}; expected (inputs, targets) or (inputs, targets, sample_weights)",
            remedy="or give a number of samples that the number of ranks divides",
        )
    if len(batch) == 2 or batch[2] is None:
        return (*batch[:2], np.full(rows_of(batch), factor, np.float32))
    weights = map_rows(lambda rows: np.asarray(keras.ops.convert_to_numpy(rows), np.float32) * factor, batch[2])
    return (*batch[:2], weights)

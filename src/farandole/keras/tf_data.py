"""A `tf.data.Dataset`, divided. See [Note: the job's batches] and [Note: weights] in `sharding`.

Each rank runs the whole pipeline and keeps its part (what `tf.data` calls sharding by data), in one pass: a second
one would shuffle anew. Where only the last batch can be short, batches of other ranks are dropped one by one, and
only what the last step of the job consists of is put together. Where any batch can be short (batches that are
repeated or shuffled, or come out of a function), and where nothing says how many there are, each step is put
together from `size` batches: a rank then holds a batch of the whole job in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..core.vocabulary.errors import ConfigError

_INFINITE = -1
"""The cardinality of a data set that does not end."""
_ALL = 2**31 - 1
_BATCHING = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset"}
_KEEPING = {
    "_AssertCardinalityDataset", "CacheDataset", "_MapDataset", "_OptionsDataset", "_ParallelMapDataset",
    "_PrefetchDataset", "_SkipDataset", "_TakeDataset",
}  # fmt: skip
"""Steps of a pipeline after which batches are as they were, in the same order."""
_OTHER_ORDER = "so each rank has another order, and samples would be lost and doubled"
_SEED = (
    "give the same seed on all ranks: dataset.shuffle(n, seed=0), image_dataset_from_directory(..., seed=0), or "
    "keras.utils.set_random_seed(0) before the data set is made"
)


def facts_of(dataset: Any) -> list[tuple[str, Any]]:
    """Return what must be the same on all ranks; raise ConfigError where the order differs by itself."""
    facts: list[tuple[str, Any]] = [
        ("elements of the data set", str(dataset.element_spec)),
        ("number of its batches", int(dataset.cardinality())),
    ]
    for each in _pipeline(dataset):
        if hasattr(each, "_seed") and hasattr(each, "_seed2"):
            seeds = [int(each._seed), int(each._seed2)]
            if seeds == [0, 0]:
                raise ConfigError(f"shard: the data set shuffles without a seed, {_OTHER_ORDER}", remedy=_SEED)
            facts.append(("seed of a shuffle", seeds))
        if getattr(each, "_deterministic", "") == "false":
            raise ConfigError(
                f"shard: {type(each).__name__.strip('_')} is made with deterministic=False, {_OTHER_ORDER}",
                remedy="leave deterministic=False out",
            )
    return facts


def shard_dataset(dataset: Any, rank: int, size: int, *, split: bool, evaluate: bool) -> Any:
    """Return the share of `rank`."""
    batch = _static_batch(dataset)
    if split and batch is not None and batch < size:
        raise ConfigError(
            f"shard: a batch of {batch} cannot be split over {size} ranks",
            remedy=f"use a batch of at least {size}",
        )
    if size == 1:
        return dataset
    made = _Share(dataset, rank, size, batch, split=split, evaluate=evaluate).make()
    options = tf.data.Options()
    options.deterministic = True  # batches in another order are other batches on other ranks
    return made.with_options(options).prefetch(tf.data.AUTOTUNE)


class _Share:
    """How one rank's share is made."""

    def __init__(
        self, dataset: Any, rank: int, size: int, batch: int | None, *, split: bool, evaluate: bool
    ) -> None:
        self._dataset = dataset
        self._rank, self._size = rank, size
        self._split, self._evaluate = split, evaluate
        self._batches = int(dataset.cardinality())
        self._is_even = _is_even(self._batches, batch, size, split=split)
        self._batch = batch
        self._is_tuple = isinstance(dataset.element_spec, tuple)
        self._adds_weights = not self._is_even and not evaluate
        if self._adds_weights:
            _refuse_without_place(dataset.element_spec)

    def make(self) -> Any:
        """Return the data set."""
        if self._split:
            return self._kept(self._dataset.map(lambda *parts: self._part(parts, cut=True)))
        whole_steps = self._whole_steps()
        if self._batch is not None and (self._batches == _INFINITE or self._batches == whole_steps * self._size):
            return self._dataset.shard(self._size, self._rank)  # nothing is left over
        begin = whole_steps * self._size
        numbered = self._dataset.enumerate()
        own = numbered.filter(lambda i, _: (i >= begin) | (i % self._size == self._rank))
        steps = own.group_by_window(
            key_func=lambda i, _: tf.cast(i >= begin, tf.int64),
            reduce_func=self._step,
            window_size_func=lambda key: tf.where(tf.equal(key, 0), *map(_int64, (1, self._size))),
        )
        if self._batches < 0 or self._evaluate:
            return self._kept(steps)
        rest = self._batches - begin
        return steps.apply(tf.data.experimental.assert_cardinality(whole_steps + -(-rest // self._size)))

    def _whole_steps(self) -> int:
        """Return how many steps of the job, from the first on, surely consist of full batches."""
        if self._batches >= 0 and self._batch is not None:
            return self._batches // self._size
        if self._batches >= 0 and _only_the_last_is_short(self._dataset):
            return max(0, self._batches - 1) // self._size
        return 0

    def _step(self, key: Any, window: Any) -> Any:
        """Return the data set of one element that is this rank's part of a step. `key` 0: of a whole one."""
        joined = window.map(lambda _, batch: batch).rebatch(_ALL)
        return joined.map(lambda *parts: self._part(parts, cut=tf.not_equal(key, 0)))

    def _part(self, parts: tuple[Any, ...], *, cut: Any) -> Any:
        """Return this rank's part of a batch that is of all ranks, or with `cut` False of this one alone."""
        element = parts if self._is_tuple else parts[0]
        count = tf.shape(tf.nest.flatten(element)[0], tf.int64)[0]
        even, rest = count // self._size, count % self._size
        own = even + tf.cast(self._rank < rest, tf.int64)
        begin = tf.where(cut, self._rank * even + tf.minimum(tf.cast(self._rank, tf.int64), rest), 0)
        own = tf.where(cut, own, count)
        factor = tf.where(cut, tf.cast(own * self._size, tf.float32) / tf.cast(count, tf.float32), 1.0)
        if not self._evaluate:  # a placeholder counts nothing
            begin, own = tf.where(tf.equal(own, 0), _int64(0), begin), tf.maximum(own, 1)
        taken = tf.nest.map_structure(lambda tensor: tensor[begin : begin + own], element)
        return _weighted(taken, factor, own) if self._adds_weights else taken

    def _kept(self, steps: Any) -> Any:
        """Return the steps that have a sample."""
        if not self._evaluate:
            return steps
        return steps.filter(lambda *parts: tf.shape(tf.nest.flatten(parts)[0])[0] > 0)


def _int64(value: int) -> Any:
    return tf.constant(value, tf.int64)


def _is_even(batches: int, batch: int | None, size: int, *, split: bool) -> bool:
    """Return whether the parts of every step are known to be equal."""
    if batch is None:
        return False
    if split:
        return batch % size == 0
    return batches == _INFINITE or (batches >= 0 and batches % size * batch % size == 0)


def _weighted(element: Any, factor: Any, count: Any) -> Any:
    """Return inputs, targets and sample weights."""
    if len(element) == 2:
        return (*element, tf.fill([count], factor))
    inputs, targets, weights = element
    return inputs, targets, tf.nest.map_structure(lambda each: tf.cast(each, tf.float32) * factor, weights)


def _refuse_without_place(spec: Any) -> None:
    if isinstance(spec, tuple) and len(spec) in {2, 3}:
        return
    raise ConfigError(
        f"shard: parts of a batch may differ in size, so samples need weights, and an element of the data set "
        f"is {spec}; expected (inputs, targets) or (inputs, targets, sample_weights)",
        remedy="or make all parts equal: batch(n, drop_remainder=True), and take(k) for a k that the "
        "number of ranks divides",
    )


def _static_batch(dataset: Any) -> int | None:
    """Return the size of all batches, None where it is not fixed; raise ConfigError for what is not batched."""
    found = set()
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise ConfigError(
                f"shard: an element of the data set has a {type(spec).__name__.removesuffix('Spec')}, "
                "which cannot be divided",
                remedy="make it dense before, with each.to_tensor() or tf.sparse.to_dense(each) in dataset.map",
            )
        if spec.shape.rank == 0:
            raise _not_batched(dataset)
        found.add(None if spec.shape.rank is None else spec.shape[0])
    if not found or (len(found) > 1 and None not in found):
        raise _not_batched(dataset)
    return found.pop() if len(found) == 1 else None


def _not_batched(dataset: Any) -> ConfigError:
    return ConfigError(
        f"shard: elements of the data set are not batches: {dataset.element_spec}",
        remedy="call dataset.batch(batch_size) before",
    )


def _pipeline(dataset: Any) -> Iterator[Any]:
    """Yield the data set and all that it is made of, as far as Python knows: not what functions return."""
    waiting = [dataset]
    while waiting:
        found = waiting.pop()
        yield found
        try:
            waiting += found._inputs()
        except (AttributeError, NotImplementedError):
            continue


def _only_the_last_is_short(dataset: Any) -> bool:
    """Return whether all batches but the last are of one size."""
    for each in _pipeline(dataset):
        kind = type(each).__name__
        if kind in _BATCHING:
            return True
        if kind not in _KEEPING:
            return False
    return False

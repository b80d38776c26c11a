"""Played by test_keras_shard.py: `farandole.keras.shard`, on one process for all ranks, and on two ranks.

``python -m tests.ranks.keras_shard_script one|ranks RESULTS.json``. One process trains on the whole batches, and
draws data sets of all lengths, whose shares for every rank it makes by itself. Ranks train on their shares, and
are given data sets that differ.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import tensorflow as tf

import farandole.keras
from farandole.core.vocabulary.errors import ConfigError, Mismatch
from farandole.keras.py_dataset import ShardedPyDataset
from farandole.keras.tf_data import facts_of, shard_dataset

WIDTH, BATCH, EPOCHS = 5, 4, 2
LENGTHS = {"uneven": 27, "placeholder": 25}
"""Of two ranks with batches of 4: the last batch of the job has 3 samples or 1."""
TRAININGS = [("tf.data", "uneven"), ("tf.data", "placeholder"), ("PyDataset", "uneven")]


class Arrays(keras.utils.PyDataset):  # type: ignore[misc]
    """Arrays in batches, shuffled as many scripts do."""

    def __init__(self, arrays: list[Any], batch: int, *, shuffles: bool = False, seed: int | None = None) -> None:
        super().__init__()
        self.arrays, self.batch, self.shuffles = arrays, batch, shuffles
        self.order = np.arange(len(arrays[0]))
        if seed is not None:
            np.random.default_rng(seed).shuffle(self.order)

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.batch)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * self.batch : (index + 1) * self.batch]
        return tuple(each[rows] for each in self.arrays)

    def on_epoch_end(self) -> None:
        if self.shuffles:
            np.random.shuffle(self.order)


def steps_of(share: Any, *, evaluate: bool) -> list[tuple[list[int], float]]:
    """Return the samples of each step, and the weight of one of them."""
    found = []
    for element in share:
        rows = np.asarray(element[0]).reshape(-1).tolist()
        assert len(element) == 2 or len(set(np.asarray(element[2]).tolist())) == 1
        found.append((rows, 1.0 if len(element) == 2 else float(np.asarray(element[2])[0])))
        assert not evaluate or len(element) == 2, "no weights"
    return found


def require_divided(shares: list[list[tuple[list[int], float]]], length: int, whole: int, evaluate: bool) -> None:
    """Raise unless the shares are the whole, each sample once, and every step has its mean."""
    size = len(shares)
    if not evaluate:
        assert {len(share) for share in shares} == {math.ceil(length / whole)}, "equal steps"
    for number in range(math.ceil(length / whole)):
        mine = [share[number] for share in shares if number < len(share)]
        expected = list(range(number * whole, min((number + 1) * whole, length)))
        assert [row for rows, weight in mine if weight for row in rows] == expected
        if not evaluate:
            mean = sum(weight * float(np.mean(rows)) for rows, weight in mine) / size
            assert mean == pytest.approx(float(np.mean(expected)), rel=1e-5)


PIPELINES: dict[str, Callable[[Any, int], Any]] = {
    "plain": lambda data, batch: data.batch(batch),
    "dropping": lambda data, batch: data.batch(batch, drop_remainder=True),
    "prefetched": lambda data, batch: data.batch(batch).map(lambda x, y: (x + 0, y)).prefetch(2),
    "of a generator": lambda data, batch: data.batch(batch).filter(lambda x, y: True),
}


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 7),
    size=st.integers(2, 3),
    pipeline=st.sampled_from(sorted(PIPELINES)),
    split=st.booleans(),
    evaluate=st.booleans(),
)
def any_tf_dataset(length: int, batch: int, size: int, pipeline: str, split: bool, evaluate: bool) -> None:
    batch = max(batch, size) if split else batch
    rows = np.arange(length).reshape(-1, 1)
    dataset = PIPELINES[pipeline](tf.data.Dataset.from_tensor_slices((rows, rows)), batch)
    facts_of(dataset)
    shares = [shard_dataset(dataset, rank, size, split=split, evaluate=evaluate) for rank in range(size)]
    found = [steps_of(share, evaluate=evaluate) for share in shares]
    for share, steps in zip(shares, found, strict=True):
        assert int(share.cardinality()) in {len(steps), -2}
    left = length // batch * batch if pipeline == "dropping" else length
    require_divided(found, left, batch if split else batch * size, evaluate)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 7),
    size=st.integers(2, 3),
    split=st.booleans(),
    evaluate=st.booleans(),
)
def any_py_dataset(length: int, batch: int, size: int, split: bool, evaluate: bool) -> None:
    batch = min(max(batch, size), length) if split else batch
    if split and batch < size:
        return
    rows = np.arange(length).reshape(-1, 1)
    source = Arrays([rows, rows], batch)
    shares = [ShardedPyDataset(source, rank, size, 0, split=split, evaluate=evaluate) for rank in range(size)]
    found = [steps_of((share[i] for i in range(len(share))), evaluate=evaluate) for share in shares]
    require_divided(found, length, batch if split else batch * size, evaluate)


def batches_that_are_short_in_the_middle() -> None:
    """Repeated after they were batched: a short batch comes before others, on another rank than theirs."""
    rows = np.arange(5).reshape(-1, 1)
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(3).repeat(2)  # 3, 2, 3, 2
    found: Any = [
        steps_of(shard_dataset(dataset, rank, 2, split=False, evaluate=False), evaluate=False) for rank in (0, 1)
    ]
    assert found[0] == [([0, 1, 2], pytest.approx(1.2))] * 2
    assert found[1] == [([3, 4], pytest.approx(0.8))] * 2
    endless = tf.data.Dataset.from_tensor_slices((rows, rows)).repeat().batch(2, drop_remainder=True)
    shares = [shard_dataset(endless, rank, 2, split=False, evaluate=False).take(3) for rank in (0, 1)]
    assert [steps_of(share, evaluate=False) for share in shares] == [
        [([0, 1], 1.0), ([4, 0], 1.0), ([3, 4], 1.0)],
        [([2, 3], 1.0), ([1, 2], 1.0), ([0, 1], 1.0)],
    ]


def weights_of_the_script() -> None:
    """They are multiplied."""
    rows = np.arange(3).reshape(-1, 1)
    weights = np.array([2.0, 3.0, 4.0], np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows, weights)).batch(2)
    found = [next(iter(shard_dataset(dataset, rank, 2, split=False, evaluate=False)))[2] for rank in (0, 1)]
    assert np.allclose(found[0], [2 * 4 / 3, 3 * 4 / 3])
    assert np.allclose(found[1], [4 * 2 / 3])


def refused_data_sets() -> None:
    rows = np.arange(8).reshape(-1, 1)
    plain = tf.data.Dataset.from_tensor_slices((rows, rows[:, 0]))
    alone = tf.data.Dataset.from_tensor_slices(rows)
    ragged = alone.map(lambda x: tf.RaggedTensor.from_tensor(tf.reshape(x, [1, 1]))).batch(2)
    refusals = {
        "not batches": lambda: shard_dataset(plain, 0, 2, split=False, evaluate=False),
        "cannot be split over 2": lambda: shard_dataset(
            plain.batch(1, drop_remainder=True), 0, 2, split=True, evaluate=False
        ),
        "samples need weights": lambda: shard_dataset(alone.batch(3), 0, 2, split=False, evaluate=False),
        "RaggedTensor": lambda: shard_dataset(ragged, 0, 2, split=False, evaluate=False),
        "without a seed": lambda: facts_of(plain.shuffle(4).batch(2)),
        "deterministic=False": lambda: facts_of(
            plain.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False).batch(2)
        ),
    }
    for text, refused in refusals.items():
        with pytest.raises(ConfigError, match=text):
            refused()
    even = alone.batch(2, drop_remainder=True)
    assert next(iter(shard_dataset(even, 1, 2, split=False, evaluate=False))).numpy().tolist() == [[2], [3]]
    shuffled = ShardedPyDataset(Arrays([rows, rows], 1), 0, 3, 0, split=False, evaluate=False)
    assert [np.asarray(shuffled[i][0]).tolist() for i in (0, 1, 0, 1)] == [[[0]], [[3]], [[0]], [[3]]]
    shuffled.on_epoch_end()
    with pytest.raises(ConfigError, match="shuffle=False"):
        shuffled[2]


def errors_on_two_ranks(rank: int) -> None:
    """Every rank raises."""
    rows = np.arange(8).reshape(-1, 1)
    plain = tf.data.Dataset.from_tensor_slices((rows, rows))
    with pytest.raises(Mismatch, match="seed of a shuffle"):
        farandole.keras.shard(plain.shuffle(8, seed=rank).batch(2))
    with pytest.raises(Mismatch, match="number of its batches"):
        farandole.keras.shard(plain.take(8 - 2 * rank).batch(2))
    with pytest.raises(Mismatch, match="first batch"):
        farandole.keras.shard(Arrays([rows, rows], 2, seed=rank))
    for wrong, remedy in {
        np.ndarray: (rows, "from_tensor_slices"), list: ([1, 2], "from_generator"), type: (Arrays, "PyDataset")
    }.values():  # fmt: skip
        with pytest.raises(ConfigError, match=remedy):
            farandole.keras.shard(wrong)
    with pytest.raises(ConfigError, match="sharded already"):
        farandole.keras.shard(farandole.keras.shard(Arrays([rows, rows], 2)))


def arrays_of(case: str) -> list[Any]:
    draw = np.random.default_rng(3)
    length = LENGTHS[case]
    return [draw.normal(size=(length, width)).astype("float32") for width in (WIDTH, 1)]


def train(case: str, kind: str, hvd: Any) -> dict[str, Any]:
    size = 1 if hvd is None else hvd.size()
    arrays = arrays_of(case)
    batch = BATCH if hvd is not None else 2 * BATCH
    data: Any
    if kind == "tf.data":
        data = tf.data.Dataset.from_tensor_slices(tuple(arrays)).shuffle(99, seed=5).batch(batch)
    else:
        data = Arrays(arrays, batch)
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((WIDTH,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if hvd is not None:
        data = farandole.keras.shard(data)
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(data, epochs=EPOCHS, verbose=0, shuffle=False)
    assert int(optimizer.iterations) == EPOCHS * math.ceil(LENGTHS[case] / (2 * BATCH)), f"{case} of {size}"
    return {"weights": [np.asarray(each).reshape(-1).tolist() for each in model.weights]}


def orders_of_epochs(rank: int) -> None:
    """A data set that shuffles by NumPy's global generator, which is in another state on each rank."""
    np.random.seed(rank)
    rows = np.arange(12).reshape(-1, 1)
    share = farandole.keras.shard(Arrays([rows, rows], 2, shuffles=True))
    import farandole.horovod.tensorflow as hvd

    state: Any = np.random.get_state()
    before = state[1].tolist()
    seen = []
    for _ in range(3):
        share.on_epoch_begin()
        own = np.concatenate([share[i][0][:, 0] for i in range(len(share))])
        everybody = hvd.allgather(tf.constant(own)).numpy()
        assert sorted(everybody) == list(range(12)), "each sample once"
        seen.append(tuple(everybody))
        share.on_epoch_end()
    assert len(set(seen)) == 3, "each epoch has another order"
    state = np.random.get_state()
    assert state[1].tolist() == before, "the script's random numbers are as they were"


def main() -> None:
    mode, path = sys.argv[1], Path(sys.argv[2])
    hvd: Any = None
    checks: list[Callable[[], None]] = [
        any_tf_dataset, any_py_dataset, batches_that_are_short_in_the_middle, weights_of_the_script,
        refused_data_sets,
    ]  # fmt: skip
    if mode == "ranks":
        import farandole.horovod.tensorflow.keras as hvd

        hvd.init()
        rank = hvd.rank()
        checks = [lambda: errors_on_two_ranks(rank), lambda: orders_of_epochs(rank)]
    results: dict[str, Any] = {"failed": []}
    for check in checks:
        try:
            check()
        except BaseException:  # pytest's own are no exceptions
            results["failed"].append(traceback.format_exc())
    for kind, case in TRAININGS:
        results[f"{kind}, {case}"] = train(case, kind, hvd)
    if hvd is None or hvd.rank() == 0 or results["failed"]:
        path.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

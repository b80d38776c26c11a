"""Played by `tensorflow_strange` and `keras_script`: a model with `SyncBatchNormalization`, and unequal rows.

Each rank trains it on its rows, and a model with plain BatchNormalization on the rows of all ranks, by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WIDTH, STEPS = 6, 8
ROWS = (5, 11)


def largest_difference(keras: Any, hvd: Any, layer: Any) -> float:
    """Return by how much weights of both models differ, after a few steps. `layer`: SyncBatchNormalization."""
    draw = np.random.default_rng(5)
    rows = [*ROWS, *[3] * hvd.size()][: hvd.size()]
    begin, count = sum(rows[: hvd.rank()]), rows[hvd.rank()]
    x = draw.normal(size=(STEPS, sum(rows), WIDTH)).astype("float32") * 3 + 2
    y = draw.normal(size=(STEPS, sum(rows), 1)).astype("float32")

    def model(kind: Any) -> Any:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        return keras.Sequential(
            [layers.Input((WIDTH,)), layers.Dense(7), kind(), layers.Dense(5, activation="tanh"), kind(),
             layers.Dense(1)]
        )  # fmt: skip

    def train(trained: Any, optimizer: Any, mine: slice, weight: float) -> list[Any]:
        trained.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(reduction="sum"))
        for step in range(STEPS):
            given = x[step, mine], y[step, mine]
            trained.train_on_batch(*given, sample_weight=np.full(len(given[0]), weight, "float32"))
        weights: list[Any] = trained.get_weights()
        return weights

    def sgd() -> Any:
        return keras.optimizers.SGD(0.05, momentum=0.9)

    everything = train(model(keras.layers.BatchNormalization), sgd(), slice(None), 1.0 / sum(rows))
    # The mean over ranks is that over rows, whose numbers differ.
    part = slice(begin, begin + count)
    mine = train(model(layer), hvd.DistributedOptimizer(sgd()), part, hvd.size() / sum(rows))
    return max(float(np.abs(a - b).max()) for a, b in zip(mine, everything, strict=True))

"""Played by test_keras.py: an elastic training that loses a rank, and the same on one process.

``python -m tests.ranks.keras_elastic_script one|ranks RESULTS.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks.keras_script import BACKEND, BATCH, dense_model, keras, weights_of

STEPS, LOST_AT = 10, 5


def main() -> None:
    draw = np.random.default_rng(11)
    x, y = draw.normal(size=(STEPS, BATCH, 12)).astype("float32"), draw.normal(size=(STEPS, BATCH, 1))
    model, optimizer = dense_model(1), keras.optimizers.SGD(0.05, momentum=0.9)
    results: dict[str, Any] = {"sizes": []}
    if sys.argv[1] == "one":
        model.compile(optimizer=optimizer, loss="mse")
        for step in range(STEPS):
            model.train_on_batch(x[step], y[step])
    else:
        names = "horovod.tensorflow.keras" if BACKEND in ("tensorflow", "tf_keras") else "horovod.keras"
        hvd = importlib.import_module(names)
        hvd.init()
        model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        state = hvd.elastic.KerasState(model, batch=0)

        def train(state: Any) -> None:
            while state.batch < STEPS:
                rank, size = hvd.rank(), hvd.size()
                if rank == 1 and state.batch == LOST_AT:
                    os._exit(9)
                part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
                model.train_on_batch(x[state.batch][part], y[state.batch][part])
                results["sizes"].append(size)
                state.batch += 1
                state.commit()

        hvd.elastic.run(train)(state)
    results["weights"] = weights_of(model)
    results["steps"] = int(model.optimizer.iterations)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

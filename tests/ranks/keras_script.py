"""Played by test_keras.py: trainings of one Keras script, on one process and on several ranks.

``python -m tests.ranks.keras_script one|ranks RESULTS.json``. One process trains on the whole batches; each rank
on its part of them. Everything else is the same, so the weights must be. The Keras is Keras 3 on KERAS_BACKEND, or
tf_keras with TF_USE_LEGACY_KERAS=1.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks.sync_norm_case import largest_difference

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
keras: Any = importlib.import_module("tf_keras" if LEGACY else "keras")
BACKEND = "tf_keras" if LEGACY else keras.backend.backend()

BATCH, STEPS, WIDTH = 16, 20, 12
MODE = sys.argv[1] if len(sys.argv) > 1 else "one"


def data(rank: int, size: int) -> tuple[Any, Any, Any]:
    """Return inputs, words and targets of this rank: its part of each global batch."""
    draw = np.random.default_rng(7)
    x = draw.normal(size=(STEPS, BATCH, WIDTH)).astype("float32")
    words = draw.integers(0, 30, size=(STEPS, BATCH, 3))
    y = draw.normal(size=(STEPS, BATCH, 1)).astype("float32")
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return tuple(each[:, part].reshape(STEPS * BATCH // size, *each.shape[2:]) for each in (x, words, y))  # type: ignore[return-value]


def dense_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((WIDTH,)),
            keras.layers.Dense(17, activation="tanh"),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def embedding_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((3,), dtype="int32"),
            keras.layers.Embedding(30, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def weights_of(model: Any) -> list[list[float]]:
    values = [each.numpy() if LEGACY else keras.ops.convert_to_numpy(each) for each in model.weights]
    return [np.asarray(value).reshape(-1).tolist() for value in values]


def loss_scaled(optimizer: Any) -> Any:
    return (keras.mixed_precision if LEGACY else keras.optimizers).LossScaleOptimizer(optimizer)


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9)},
    "adam": {"optimizer": lambda: keras.optimizers.Adam(0.01)},
    "clipped": {"optimizer": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5)},
    "embedding": {"optimizer": lambda: keras.optimizers.Adam(0.01), "words": True},
    "eager": {"optimizer": lambda: keras.optimizers.Adam(0.01), "compile": {"run_eagerly": True}},
    "several steps": {"optimizer": lambda: keras.optimizers.SGD(0.05), "compile": {"steps_per_execution": 4}},
    "groups": {"optimizer": lambda: keras.optimizers.SGD(0.05), "distribute": {"groups": 2}},
    "scaled": {"optimizer": lambda: loss_scaled(keras.optimizers.SGD(0.05))},
    "accumulated": {  # by Keras 3 itself, and clipped after that
        "optimizer": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5, gradient_accumulation_steps=2),
    },
    "old sgd": {"optimizer": lambda: keras.optimizers.legacy.SGD(0.05, momentum=0.9)},
    "old embedding": {
        "optimizer": lambda: keras.optimizers.legacy.Adam(0.01),
        "words": True,
        "names": "horovod.keras",
    },
    "scaled around": {"optimizer": lambda: keras.optimizers.SGD(0.05), "around": loss_scaled},
    "old scaled around": {
        "optimizer": lambda: keras.optimizers.legacy.SGD(0.05),
        "around": loss_scaled,
    },
    "passes": {
        "optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "distribute": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        "joined": 2,
    },
    "old passes": {
        "optimizer": lambda: keras.optimizers.legacy.SGD(0.05, momentum=0.9),
        "distribute": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        "joined": 2,
    },
}
"""``joined``: batches that one process takes as one; ``around``: what is put around the distributed optimizer;
``names``: where Horovod's are from, here from those for Keras 3: what the optimizer is of decides."""
PLAYED = {
    "tensorflow": [
        "sgd", "adam", "clipped", "embedding", "eager", "several steps", "groups", "scaled", "accumulated",
    ],
    "torch": ["sgd", "adam", "embedding", "accumulated"],
    "tf_keras": [
        "sgd", "adam", "embedding", "eager", "scaled", "old sgd", "old embedding", "scaled around",
        "old scaled around", "passes", "old passes",
    ],
}  # fmt: skip
SOME = ["sgd", "embedding", "clipped"]
"""What the gate plays: dense and sparse gradients, and what Keras does to them after the exchange."""


def add_up_equal_rows(optimizer: Any) -> None:
    """Give an optimizer of one process dense gradients: equal rows of sparse ones are different ones to Keras."""
    import tensorflow as tf

    plain = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        return plain([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)

    object.__setattr__(optimizer, "apply", apply)


def train(case: dict[str, Any], hvd: Any) -> dict[str, Any]:
    rank, size = (0, 1) if hvd is None else (hvd.rank(), hvd.size())
    x, words, y = data(rank, size)
    model = (embedding_model if case.get("words") else dense_model)(seed=1 + rank)  # the broadcast makes it one
    optimizer = case["optimizer"]()
    callbacks = []
    together = 1 if hvd is not None else case.get("joined", 1)
    if hvd is not None:
        hvd = importlib.import_module(case["names"]) if "names" in case else hvd
        optimizer = hvd.DistributedOptimizer(optimizer, **case.get("distribute", {}))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    elif BACKEND == "tensorflow":
        add_up_equal_rows(optimizer)
    optimizer = case.get("around", lambda it: it)(optimizer)
    if hvd is not None and BACKEND == "torch":
        count_exchanges(optimizer)
    model.compile(optimizer=optimizer, loss="mse", **case.get("compile", {}))
    history = model.fit(
        words if case.get("words") else x,
        y,
        batch_size=BATCH * together // size,
        epochs=1,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return {
        "weights": weights_of(model),
        "loss": history.history["loss"],
        "kind": type(model.optimizer).__name__,
        "exchanges": getattr(optimizer, "_exchanges", 0),
    }


def count_exchanges(optimizer: Any) -> None:
    """Count them in `_exchanges`, where no graph hides them."""
    exchange = optimizer._gradients()
    object.__setattr__(optimizer, "_exchanges", 0)

    def counted(gradients: Any, variables: Any) -> Any:
        object.__setattr__(optimizer, "_exchanges", optimizer._exchanges + 1)
        return exchange(gradients, variables)

    object.__setattr__(optimizer, "_farandole_gradients", counted)


def warm_up(hvd: Any) -> dict[str, Any]:
    """Return the learning rate of each batch, and the last one of each epoch."""
    rates: list[float] = []
    x, _, y = data(hvd.rank(), hvd.size())
    model = dense_model(1)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.08, momentum=0.9)), loss="mse")
    seen: Any = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(seen.model.optimizer.learning_rate))
    )
    initial = {"initial_lr": 0.08} if BACKEND == "torch" else {}  # without it, the optimizer's
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=1, **initial),
        hvd.callbacks.LearningRateScheduleCallback(0.08, 0.1, start_epoch=3),
        seen,
    ]
    history = model.fit(x, y, batch_size=80, epochs=5, verbose=0, callbacks=callbacks)
    return {"rates": rates, "logs": history.history["lr"]}


def saved(hvd: Any, folder: Path) -> dict[str, Any]:
    """Return whether a saved model loads without us, and with its optimizer's state."""
    model = dense_model(3)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    x, _, y = data(hvd.rank(), hvd.size())
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    path = folder / f"model{hvd.rank()}.keras"
    model.save(path)
    again = hvd.load_model(path)
    plain = keras.models.load_model(path)
    return {
        "path": str(path),
        "kind": [type(plain.optimizer).__name__, type(plain.optimizer).__mro__[0].__module__],
        "distributed": hasattr(again.optimizer, "register_local_var"),
        "plain": not hasattr(plain.optimizer, "register_local_var"),
        "steps": [int(each.optimizer.iterations) for each in (model, again, plain)],
    }


def main() -> None:
    folder = Path(sys.argv[2]).parent
    some = os.environ.get("TRAININGS") == "some"
    chosen = {name: CASES[name] for name in (SOME if some else PLAYED[BACKEND])}
    results: dict[str, Any] = {}
    if MODE == "one":
        results = {name: train(case, None) for name, case in chosen.items()}
    else:
        # By --as-horovod: what scripts import.
        names = "horovod.tensorflow.keras" if BACKEND in ("tensorflow", "tf_keras") else "horovod.keras"
        hvd = importlib.import_module(names)
        hvd.init()
        results = {name: train(case, hvd) for name, case in chosen.items()}
        results["warm-up"] = warm_up(hvd)
        results["saved"] = saved(hvd, folder)
        if BACKEND == "torch":
            results["normalised"] = largest_difference(keras, hvd, hvd.SyncBatchNormalization)
        results["kept"] = kept(hvd)
        results["equal"] = len({json.dumps(each) for each in _everybody(hvd, results)}) == 1
        if hvd.rank():
            return
    Path(sys.argv[2]).write_text(json.dumps(results))


def kept(hvd: Any) -> dict[str, Any]:
    """Return what an elastic state has given back: all weights, the optimizer's too, and a number."""
    model = dense_model(4 + hvd.rank())
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=3)
    state.sync()
    x, _, y = data(hvd.rank(), hvd.size())
    model.fit(x, y, batch_size=32, verbose=0)
    state.save()
    before = weights_of(model), int(model.optimizer.iterations)
    state.batch = 5
    model.fit(x, y, batch_size=32, verbose=0)
    changed = weights_of(model) != before[0]
    state.restore()
    same = (weights_of(model), int(model.optimizer.iterations)) == before
    return {"changed": changed, "same": same, "batch": state.batch, "weights": weights_of(model)}


def _everybody(hvd: Any, results: dict[str, Any]) -> list[Any]:
    from farandole.horovod.common.objects import allgather_object

    return allgather_object([results[name].get("weights") for name in sorted(results) if name != "normalised"])


if __name__ == "__main__":
    main()

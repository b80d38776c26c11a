"""Played by test_keras_watch.py: trainings of Keras on two ranks, watched by warnings and by ``farandole verify``.

``farandole run --as-horovod -np 2 -- python -m tests.ranks.keras_watch_script RESULTS.json``. Each case has a
world of its own, so one start of the libraries serves all. The script ends where ``verify`` ends it: that is
caught here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras

WIDTH, BATCH, STEPS = 6, 4, 9
BACKEND = keras.backend.backend()


def hvd() -> Any:
    """Return the front end of the backend, by the name that scripts import."""
    return importlib.import_module("horovod.tensorflow.keras" if BACKEND == "tensorflow" else "horovod.keras")


def data(rank: int, steps: int = STEPS) -> tuple[Any, Any]:
    draw = np.random.default_rng(rank)
    x = draw.normal(size=(steps * BATCH, WIDTH)).astype("float32")
    return x, x.sum(1, keepdims=True).astype("float32")


def model_of(*middle: Any, seed: int = 1) -> Any:
    keras.utils.clear_session()  # names are counted anew
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Input((WIDTH,)), keras.layers.Dense(5, activation="tanh"), *middle]
    return keras.Sequential([*layers, keras.layers.Dense(1)])


def fit(
    model: Any, rank: int, *, broadcast: bool = True, distribute: bool = True, steps: int = STEPS, **others: Any
) -> None:
    callbacks = list(others.pop("callbacks", []))
    optimizer = others.pop("optimizer", None) or keras.optimizers.SGD(0.05, momentum=0.9)
    if distribute:
        optimizer = hvd().DistributedOptimizer(optimizer, **others.pop("distributed", {}))
    model.compile(optimizer=optimizer, loss="mse", **others.pop("compile", {}))
    if broadcast:
        callbacks.append(hvd().callbacks.BroadcastGlobalVariablesCallback(0))
    x, y = data(rank, steps)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks, **others)


def of_tf_keras(rank: int, samples: int | None = None) -> None:
    """A model of tf_keras, in a graph."""
    tf_keras = importlib.import_module("tf_keras")
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.Sequential(
        [tf_keras.layers.InputLayer((WIDTH,)), tf_keras.layers.Dense(5), tf_keras.layers.Dense(1)]
    )
    fit(model, rank if samples is None else samples, optimizer=tf_keras.optimizers.SGD(0.05, momentum=0.9))


def own_loop(rank: int, *, broadcast: bool = True) -> None:
    """A loop of the script's own, outside graphs."""
    import tensorflow as tf

    names = importlib.import_module("horovod.tensorflow")
    model, optimizer = model_of(seed=1 if broadcast else rank + 1), keras.optimizers.SGD(0.05)
    if broadcast:
        names.broadcast_variables(model.variables, root_rank=0)
    x, y = data(rank)
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[part], training=True) - y[part]) ** 2)
        tape = names.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    raise AssertionError("it was to end after three steps")


def kept_on_each_rank(rank: int) -> None:
    """A layer is each rank's own, and begins with other weights."""
    keras.utils.set_random_seed(1)
    model = model_of()
    model.layers[0].bias.assign(np.full(5, float(rank), "float32"))
    optimizer = hvd().DistributedOptimizer(keras.optimizers.SGD(0.05))
    optimizer.register_local_var(model.layers[0].bias)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = data(rank)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


ON_TORCH = ("right", "same samples", "other weights")
"""Its cases: the code of the others is the same."""
VERIFIED: dict[str, Callable[[int], None]] = {
    "right": lambda rank: fit(model_of(), rank),
    "same samples": lambda rank: fit(model_of(), 0),
    "other weights": lambda rank: fit(model_of(seed=rank + 1), rank, broadcast=False),
    "not distributed": lambda rank: fit(model_of(), rank, distribute=False),
    "own loop": own_loop,
    "own loop, other weights": lambda rank: own_loop(rank, broadcast=False),
    "kept on each rank": kept_on_each_rank,
    "eager": lambda rank: fit(model_of(), rank, compile={"run_eagerly": True}),
    "passes": lambda rank: fit(  # more than the steps that are verified
        model_of(), rank, steps=12, distributed={"backward_passes_per_step": 4}, compile={"run_eagerly": True}
    ),
    "added by Keras": lambda rank: fit(
        model_of(),
        rank,
        optimizer=keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        compile={"run_eagerly": True},
    ),
    "tf_keras": of_tf_keras,
    "tf_keras, same samples": lambda rank: of_tf_keras(rank, 0),
}


class OwnRate(keras.callbacks.Callback):  # type: ignore[misc]
    """Lowers the rate of one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 5 and self._rank == 1:
            self.model.optimizer.learning_rate = 0.03125


def warned(rank: int) -> dict[str, Any]:
    """Return the warnings of a training with two mistakes, and what the ranks' dropout masks are."""
    model = model_of(keras.layers.Dropout(0.5))
    before = np.asarray(keras.ops.convert_to_numpy(model.layers[0].kernel)).tolist()
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        fit(model, 0, callbacks=[OwnRate(rank)])
    masks = keras.ops.convert_to_numpy(model.layers[1](np.ones((8, 16), "float32"), training=True))
    return {"masks": (np.asarray(masks) > 0).tolist(), "weights": before, "said": told.getvalue()}


def quiet(rank: int) -> dict[str, Any]:
    """Return the warnings of a training without mistakes."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        several = 3 if BACKEND == "tensorflow" else 1
        fit(model_of(keras.layers.Dropout(0.5)), rank, compile={"steps_per_execution": several})
    return {"said": told.getvalue()}


def main() -> None:
    results: dict[str, Any] = {}
    directory = Path(os.environ["FARANDOLE_RUN_DIR"])
    front_end = hvd()
    rank = int(os.environ["RANK"])
    for name, case in (("warned", warned), ("quiet", quiet)):
        front_end.init()
        from farandole.horovod.common.objects import allgather_object

        results[name] = allgather_object(case(rank))
        front_end.shutdown()
    os.environ["FARANDOLE_VERIFY_STEPS"] = "3"
    for name, train in VERIFIED.items():
        if BACKEND == "torch" and name not in ON_TORCH:
            continue
        if name.startswith("tf_keras") and importlib.util.find_spec("tf_keras") is None:
            continue
        front_end.init()
        ended = False
        try:
            train(rank)
        except SystemExit:
            ended = True
        front_end.shutdown()
        if rank == 0:
            written = directory / "verify.json"
            results[name] = {"ended": ended, **json.loads(written.read_text())}
            written.unlink()
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""Played by test_keras_auto.py: Keras trains by a plan with codec "auto", beside one process on the joined batch.

``python -m tests.net.keras_auto_script FOLDER``: each rank writes what it found there.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import farandole.horovod.keras as hvd
from farandole.core.vocabulary.errors import PlanError

WIDTH, BATCH, STEPS = 256, 16, 12


def data(rank: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(rank)
    x = draw.normal(size=(BATCH, WIDTH)).astype("float32")
    return x, np.tanh(x[:, ::-1])


def model_of(optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((WIDTH,)), dense(WIDTH, activation="tanh"), dense(WIDTH)])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fitted(model: Any, x: Any, y: Any) -> list[Any]:
    """Return the weights after `STEPS` steps, each on all of the data, with our callbacks."""
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if hvd.is_initialized() else []
    model.fit(x, y, batch_size=len(x), epochs=STEPS, shuffle=False, verbose=0, callbacks=callbacks)
    weights: list[Any] = model.get_weights()
    return weights


def by_a_tape(x: Any, y: Any) -> list[Any]:
    """Return the weights of a loop of the script's own, outside graphs: each operation is waited for."""
    import tensorflow as tf

    import farandole.horovod.tensorflow as hvd_tf

    model = model_of(optimizer := keras.optimizers.SGD(0.5))
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        tape = hvd_tf.DistributedGradientTape(tape) if hvd.is_initialized() else tape
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    weights: list[Any] = model.get_weights()
    return weights


def refuse_adasum() -> None:
    import tensorflow as tf

    import farandole.horovod.tensorflow as hvd_tf

    with tf.GradientTape() as tape:
        loss = (x := tf.Variable(tf.ones((WIDTH, WIDTH)))) * x
    with pytest.raises(PlanError, match=r"codec = 'auto' .*op=Adasum needs exact gradients"):
        hvd_tf.DistributedGradientTape(tape, op=hvd_tf.Adasum).gradient(loss, x)


def error(weights: list[Any], exact: list[Any]) -> float:
    """Return how far weights are from others, beside how far these went."""
    begin = model_of(keras.optimizers.SGD(0.5)).get_weights()
    off = sum(float(np.square(a - b).sum()) for a, b in zip(weights, exact, strict=True))
    went = sum(float(np.square(a - b).sum()) for a, b in zip(begin, exact, strict=True))
    return float(np.sqrt(off / went))


def fingerprint(weights: list[Any]) -> str:
    return sha256(b"".join(part.tobytes() for part in weights)).hexdigest()


def main() -> None:
    joined = [np.concatenate(parts) for parts in zip(data(0), data(1), strict=True)]
    on_tensorflow = keras.backend.backend() == "tensorflow"
    alone = {"fit": fitted(model_of(keras.optimizers.SGD(0.5)), *joined)}
    if on_tensorflow:
        alone["tape"] = by_a_tape(*joined)
    hvd.init()
    mine = data(hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    together = {"fit": fitted(model_of(optimizer), *mine)}
    if on_tensorflow:
        together["tape"] = by_a_tape(*mine)
        refuse_adasum()
    found = {
        "errors": {name: error(weights, alone[name]) for name, weights in together.items()},
        "bits": {name: fingerprint(weights) for name, weights in together.items()},
    }
    Path(sys.argv[1], f"rank{hvd.rank()}.json").write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()

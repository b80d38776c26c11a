"""Played by test_keras_records.py: a script for Horovod whose `fit` waits for its data, on two ranks.

``python -m tests.ranks.keras_records_script RESULTS.json``, with HOROVOD_TIMELINE=DYNAMIC. After the training
there are shorter ones, of `MORE`, with data that come in other ways.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, STEPS, EPOCHS = 8, 12, 3
BATCH_SECONDS, SAVE_SECONDS = 0.05, 0.2
MORE = ("quick", "slow map", "slow PyDataset", "slow, three steps a call")
"""Trainings of `STEPS` steps each."""


def batches() -> Iterator[Any]:
    """Return batches that take a while to make."""
    draw = np.random.default_rng(1)
    while True:
        time.sleep(BATCH_SECONDS)
        yield draw.normal(size=(BATCH, 12)).astype("float32"), draw.normal(size=(BATCH, 1)).astype("float32")


def more(model: Any, dataset: Any, callbacks: Any) -> None:
    """Train with data of each kind of `MORE`."""
    import keras
    import tensorflow as tf

    x, y = (np.tile(part, (STEPS, 1)) for part in next(batches()))
    quick = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)

    def wait(part: Any) -> Any:
        time.sleep(BATCH_SECONDS)
        return part

    def slowly(x: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape), y

    class Slow(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, place: int) -> Any:
            time.sleep(BATCH_SECONDS)
            rows = slice(place * BATCH, (place + 1) * BATCH)
            return x[rows], y[rows]

    for data in (quick, quick.map(slowly), Slow()):
        model.fit(data, verbose=0, callbacks=callbacks)
    model.steps_per_execution = 3
    model.make_train_function(force=True)
    model.fit(dataset, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks)


def main() -> None:
    import keras  # not above: the test takes the numbers from here
    import tensorflow as tf

    hvd = importlib.import_module("horovod.tensorflow.keras")  # by --as-horovod: what scripts import
    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((12,)), keras.layers.Dense(3000, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    shapes = (tf.TensorSpec((BATCH, 12), tf.float32), tf.TensorSpec((BATCH, 1), tf.float32))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=shapes)
    results = Path(sys.argv[1])

    def epoch_begins(epoch: int, _: Any) -> None:
        if epoch == 1:
            hvd.start_timeline(f"{results}.timeline.json")
        elif epoch == 2:
            hvd.stop_timeline()

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(
            on_epoch_begin=epoch_begins, on_epoch_end=lambda *_: time.sleep(SAVE_SECONDS)
        ),
    ]
    x, y = next(batches())
    model.fit(
        dataset,
        steps_per_epoch=STEPS,
        epochs=EPOCHS,
        validation_data=(x, y),
        verbose=0,
        callbacks=callbacks,
    )
    more(model, dataset, callbacks[:2])
    elements = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    if hvd.rank() == 0:
        results.write_text(json.dumps({"elements": elements}))
    hvd.shutdown()


if __name__ == "__main__":
    main()

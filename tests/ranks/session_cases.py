"""Played by keras_script: trainings in sessions of TensorFlow 1, with its own optimizers."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import tensorflow as tf

OPTIMIZERS: dict[str, Any] = {
    "session adam": lambda v1: v1.train.AdamOptimizer(0.01),
    "session scaled": lambda v1: v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
        v1.train.GradientDescentOptimizer(0.05), "dynamic"
    ),
}


def train_in_session(hvd: Any, name: str, x: Any, words: Any, y: Any, batch: int) -> dict[str, Any]:
    """Return the weights after a training of a small model with rows that several ranks have."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        inputs = v1.placeholder(tf.float32, [None, x.shape[1]])
        picked = v1.placeholder(tf.int64, [None, words.shape[1]])
        targets = v1.placeholder(tf.float32, [None, 1])
        draw = np.random.default_rng(3 if hvd is None or hvd.rank() == 0 else 4)  # the broadcast makes it one
        shapes = {"table": (30, 4), "kernel": (x.shape[1] + 4, 5), "out": (5, 1)}
        table, kernel, out = (
            v1.get_variable(each, initializer=draw.normal(size=shape).astype("float32"), use_resource=True)
            for each, shape in shapes.items()
        )
        rows = tf.reduce_sum(tf.nn.embedding_lookup(table, picked), 1)
        hidden = tf.tanh(tf.concat([inputs, rows], 1) @ kernel)
        loss = tf.reduce_mean((hidden @ out - targets) ** 2)
        optimizer = OPTIMIZERS[name](v1)
        if hvd is not None:
            both = importlib.import_module("horovod.tensorflow")
            optimizer = both.DistributedOptimizer(optimizer)
        step = optimizer.minimize(loss)
        with v1.Session(graph=graph) as session:
            session.run(v1.global_variables_initializer())
            state = None
            if hvd is not None:
                session.run(both.broadcast_global_variables(0))
                state = both.elastic.TensorFlowState(session=session, batch=0)
            for begin in range(0, len(x), batch):
                part = slice(begin, begin + batch)
                session.run(step, {inputs: x[part], picked: words[part], targets: y[part]})
                if state is not None and begin == batch:
                    state.save()
                    session.run(step, {inputs: x[part], picked: words[part], targets: y[part]})
                    state.restore()  # as if it had not been
            return {"weights": [each.reshape(-1).tolist() for each in session.run([table, kernel, out])]}

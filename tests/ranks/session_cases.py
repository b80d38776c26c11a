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
    "session passes": lambda v1: v1.train.MomentumOptimizer(0.1, 0.9),
}
PASSES = {"session passes": 2}


def train_in_session(hvd: Any, name: str, x: Any, words: Any, y: Any, batch: int) -> dict[str, Any]:
    """Return the weights after a training of a small model with rows that several ranks have."""
    v1 = tf.compat.v1
    passes = 1 if hvd is None else PASSES.get(name, 1)
    batch //= passes
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
            optimizer = both.DistributedOptimizer(
                optimizer, backward_passes_per_step=passes, sparse_as_dense=passes > 1,
                average_aggregated_gradients=passes > 1,
            )  # fmt: skip
        if name in PASSES:  # the norm is that of the batch of all ranks and passes
            pairs = optimizer.compute_gradients(loss)
            clipped, _ = tf.clip_by_global_norm([tf.convert_to_tensor(each) for each, _ in pairs], 0.5)
            step = optimizer.apply_gradients(
                list(zip(clipped, (each for _, each in pairs), strict=True)), v1.train.get_or_create_global_step()
            )
        else:
            step = optimizer.minimize(loss)
        with v1.Session(graph=graph) as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            state = None
            if hvd is not None:
                session.run(both.broadcast_global_variables(0))
                state = both.elastic.TensorFlowState(session=session, batch=0) if passes == 1 else None
            for begin in range(0, len(x), batch):
                part = slice(begin, begin + batch)
                session.run(step, {inputs: x[part], picked: words[part], targets: y[part]})
                if state is not None and begin == batch:
                    state.save()
                    session.run(step, {inputs: x[part], picked: words[part], targets: y[part]})
                    state.restore()  # as if it had not been
            if name in PASSES:
                steps = session.run(v1.train.get_global_step())
                assert steps == len(x) // batch // passes, f"{steps} steps of {len(x) // batch} runs"
            return {"weights": [each.reshape(-1).tolist() for each in session.run([table, kernel, out])]}

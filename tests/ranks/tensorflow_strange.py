"""Checks of `tensorflow_script`: what differs between ranks, bad input, and names that scripts of Horovod use."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

import farandole.horovod.keras as hvd_keras
import farandole.horovod.tensorflow as hvd
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.tensorflow.sync_batch_norm import sync_batch_normalization_of
from tests.ranks.sync_norm_case import largest_difference
from tests.ranks.tensorflow_tools import DISAGREE, HAS_KERNEL, both, everybody, graph, mine, raises, same

INVALID = tf.errors.InvalidArgumentError


def check_an_exchange_whose_result_one_rank_alone_uses() -> None:
    w = tf.Variable([1.0, 2.0])

    @graph
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name="inner")

    @graph
    def step(x: Any, flag: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        (gradient,) = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [w])
        total, nested = hvd.allreduce(x, op=hvd.Sum, name="outer"), inner(x)
        branch = tf.cond(flag, lambda: [hvd.allreduce(x, op=hvd.Sum, name="branch"), x][hvd.rank() % 2], lambda: x)
        return (total, nested, gradient, branch) if hvd.rank() == 0 else x

    for flag in (True, False, True):
        found = step(tf.ones([2]), tf.constant(flag))
        if hvd.rank() == 0:
            for each in found[: 4 if flag else 3]:
                same(each, tf.fill([2], float(hvd.size())))
    hvd.allreduce(tf.ones([1]))  # all of them are done


def check_a_rank_without_gradients() -> None:
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])

    def gradients(has: bool) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a) * 2.0 + tf.reduce_sum(b) if has else tf.constant(1.0)
        found: list[Any] = hvd.DistributedGradientTape(tape).gradient(loss, [a, b])
        return found

    for where in (lambda f: f, graph):
        raises(DISAGREE, "gradient 0 is", partial(where(gradients), has=hvd.rank() == 0))
    for where in (lambda f: f, graph):
        assert where(gradients)(has=False) == [None, None]
    same(gradients(has=True)[0], tf.fill([2], 2.0))
    raises(DISAGREE, "gradients of the same variables in each step", partial(gradients, has=hvd.rank() == 0))
    same(gradients(has=True)[0], tf.fill([2], 2.0))


def check_ranks_whose_gradients_change() -> None:
    a, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2]))

    def gradients(uses_a: bool, is_sparse: bool) -> list[Any]:
        with tf.GradientTape() as tape:
            picked = tf.gather(table, [1]) if is_sparse else table * 2.0
            loss = tf.reduce_sum(picked) + (tf.reduce_sum(a) if uses_a else 0.0)
        found: list[Any] = hvd.DistributedGradientTape(tape).gradient(loss, [table, a])
        return found

    first = hvd.rank() == 0
    same(gradients(uses_a=True, is_sparse=False)[1], tf.ones([2]))
    raises(DISAGREE, "different ones in this step", lambda: gradients(uses_a=first, is_sparse=False))
    raises(DISAGREE, "different ones in this step", lambda: gradients(uses_a=True, is_sparse=first))
    raises(DISAGREE, "gradient 0 is", lambda: gradients(uses_a=False, is_sparse=first))
    same(gradients(uses_a=True, is_sparse=False)[1], tf.ones([2]))


def check_adasum_equals_numpy() -> None:
    a, b = (np.asarray(mine((7, 3), rank=rank), np.float64) + 0.5 for rank in range(2))
    dot = float((a * b).sum())
    expected = (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
    w = tf.Variable(tf.zeros([7, 3]))
    x = tf.cast(a if hvd.rank() == 0 else b, tf.float32)

    def by_tape(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, w)

    for found in both(lambda x: hvd.allreduce(x, op=hvd.Adasum), x) + both(by_tape, x):
        assert np.abs(found.numpy() - expected).max() < 1e-5, (found, expected)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
    graph(lambda x: optimizer.apply([x], [w]))(x)
    assert np.abs(w.numpy() + expected).max() < 1e-5
    raises(NotImplementedError, "The Adasum reduction does not currently support sparse tensors", lambda: (
        hvd.allreduce(tf.IndexedSlices(x, tf.range(7)), op=hvd.Adasum)))  # fmt: skip
    options: dict[str, Any] = {"op": hvd.Adasum, "average_aggregated_gradients": True}
    raises(ValueError, "Adasum does not support average_aggregated_gradients == True", lambda: (
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)))  # fmt: skip


def check_powersgd() -> None:
    """A mean of a rank below the codec's is exact; of others the residual is made up for in later steps."""
    rank, size = hvd.rank(), hvd.size()
    w = tf.Variable(tf.zeros([96, 64]))

    def step(x: Any, most: int) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return hvd.DistributedGradientTape(tape, compression=hvd.Compression.powersgd(most)).gradient(loss, w)

    def random(shape: list[int], seed: int) -> Any:
        return tf.random.stateless_normal(shape, [seed, 5])

    parts = [random([96, 1], r) @ random([1, 64], 10 + r) for r in range(size)]
    mean = tf.add_n(parts) / float(size)
    for found in both(partial(step, most=4), parts[rank]):
        assert float(tf.reduce_max(tf.abs(found - mean))) < 1e-4
    parts = [random([96, 64], 20 + r) for r in range(size)]
    mean = tf.add_n(parts) / float(size)
    traced = graph(partial(step, most=8))
    total, steps = tf.zeros_like(mean), 24
    errors = []
    for number in range(1, steps + 1):
        total += traced(parts[rank])
        errors.append(float(tf.norm(total / number - mean) / tf.norm(mean)))
    assert errors[-1] < 0.4 * errors[0], errors


def check_names_of_operations() -> None:
    x = tf.ones([2])
    for name in ("a b", "a/b", "a:b", "a/", "_a", "", "é"):
        for found in both(partial(hvd.allreduce, op=hvd.Sum, name=name), x):
            same(found, x * hvd.size())

    def twice(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name="twice") + hvd.allreduce(x, op=hvd.Sum, name="twice")

    for found in both(twice, x):
        same(found, x * 2 * hvd.size())
    for where in (lambda f: f, graph):
        raises(ValueError, "name=3", where(lambda: hvd.allreduce(x, name=cast(Any, 3))))


def check_shapes_that_are_known_late() -> None:
    size = hvd.size()

    def unknown(operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # A lambda, as the other arguments of the operation are no tensors.
        return graph(lambda x: operation(x), input_signature=[tf.TensorSpec(None, tf.float32)])  # noqa: PLW0108

    x = mine((size, 2))
    same(unknown(lambda x: hvd.allreduce(x, op=hvd.Sum))(x), tf.add_n(everybody((size, 2))))
    same(unknown(hvd.allgather)(x), tf.concat(everybody((size, 2)), 0))
    same(unknown(lambda x: hvd.broadcast(x, 1))(x), mine((size, 2), rank=1))
    same(unknown(lambda x: hvd.reducescatter(x, op=hvd.Sum))(x), tf.add_n(everybody((size, 2)))[hvd.rank() :][:1])
    expected = tf.stack([part[hvd.rank()] for part in everybody((size, 2))])
    same(unknown(hvd.alltoall)(x), expected)
    scalars = (INVALID,) if HAS_KERNEL else (INVALID, tf.errors.UnknownError)
    for operation in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        raises(scalars, "does not support scalar inputs", partial(unknown(operation), tf.constant(1.0)))


def check_texts_of_errors() -> None:
    x, w = mine((4,)), tf.Variable([1.0])
    slices = tf.IndexedSlices(mine((2, 2)), tf.constant([0, 1]))
    raises(INVALID, "Reducescatter does not support scalar inputs", lambda: hvd.reducescatter(tf.constant(1.0)))
    raises(ValueError, "HorovodReducescatter does not support scalar inputs.", graph(
        lambda: hvd.reducescatter(tf.constant(1.0))))  # fmt: skip
    raises(NotImplementedError, "Only Sum and Average ops are supported with tf.IndexedSlices", lambda: (
        hvd.allreduce(slices, op=hvd.Min)))  # fmt: skip
    raises(NotImplementedError, "Pre/postscale_factor are not supported with tf.IndexedSlices", lambda: (
        hvd.allreduce(slices, prescale_factor=2.0)))  # fmt: skip
    raises(ValueError, "gradient_predivide_factor not supported with op != Average", lambda: (
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)))  # fmt: skip
    raises(ValueError, "groups should be a non-negative integer or a list of list of tf.Variable.", lambda: (
        hvd.DistributedGradientTape(tf.GradientTape(), groups=-1)))  # fmt: skip
    raises(ValueError, "All local layers must be of tf.keras.layers.Layer type.", lambda: (
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[w])))  # fmt: skip
    raises(RuntimeError, "hvd.broadcast_global_variables() does not support eager execution. Please use "
           "`hvd.broadcast_variables(<model/optimizer variables>)` instead.",
           lambda: hvd.broadcast_global_variables(0))  # fmt: skip
    raises(ValueError, "Model must be built first. Run `model.build(input_shape)`.", lambda: (
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(2)]))))  # fmt: skip
    raises(ValueError, "backward_passes_per_step must be > 0", lambda: (
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=-1)))  # fmt: skip
    sparse = hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2)
    table = tf.Variable(tf.ones([4, 2]))
    raises(ValueError, "IndexedSlices are not supported when `backward_passes_per_step` > 1 and "
           "`sparse_as_dense` is False.", lambda: sparse.apply([slices], [table]))  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)
    text = "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0."
    assert any(text in str(each.message) for each in seen), seen
    for wrong, text in ((None, "is no tensor"), (object(), "is no tensor"), (w.handle, "resource"),
                        (keras.Input((2,)), "symbolic"), (tf.sparse.eye(2), "SparseTensor")):  # fmt: skip
        raises((INVALID, ValueError), text, partial(hvd.allreduce, wrong))
    raises(INVALID, "root rank", lambda: hvd.broadcast(x, hvd.size()))
    raises(ValueError, "op=9", lambda: hvd.allreduce(x, op=9))
    raises(ValueError, "compression=None", lambda: hvd.allreduce(x, compression=None))
    none: Any = None
    raises(ValueError, "process_set=None", lambda: hvd.allreduce(x, process_set=none))
    raises(
        ValueError, "process_set=None", lambda: hvd.DistributedGradientTape(tf.GradientTape(), process_set=none)
    )
    raises(ValueError, "root='0'", lambda: hvd.broadcast(x, cast(Any, "0")))
    raises(ValueError, "prescale=None", lambda: hvd.allreduce(x, prescale_factor=none))
    raises(ValueError, "expected a tf.GradientTape", lambda: hvd.DistributedGradientTape(None))
    raises(ValueError, "has no variables yet", lambda: hvd.PartialDistributedGradientTape(
        tf.GradientTape(), local_layers=keras.layers.Dense(2)))  # fmt: skip
    raises(INVALID, "splits", lambda: hvd.alltoall(x, tf.ones([hvd.size() + 1], tf.int32)))


def check_helpers_of_scripts() -> None:
    assert hvd.util.vars_to_refs is hvd.vars_to_refs
    a, b = tf.Variable(1.0), keras.Variable(2.0)
    refs = hvd.vars_to_refs([a, [b]])
    assert isinstance(refs, tuple)
    assert len({refs, hvd.vars_to_refs([a, [b]])}) == 1
    back = hvd.refs_to_vars(refs)
    assert back[0] is a
    assert back[1][0] is b
    assert hvd.broadcast_object_fn(1)({"rank": hvd.rank()}) == {"rank": 1}
    assert not hvd.gpu_available("tensorflow")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hvd.broadcast_variables([], 0)
    assert any("no variables" in str(each.message) for each in seen), seen


def check_older_methods_of_optimizers() -> None:
    size = hvd.size()
    total = sum(rank + 1.0 for rank in range(size))
    w = tf.Variable([5.0, 7.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), op=hvd.Sum)
    optimizer.build([w])
    assert optimizer.variables == optimizer.variables()
    assert len(optimizer.variables()) == 3
    factor = hvd.rank() + 1.0

    def clipped_step() -> None:
        pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(w) * factor, [w])
        optimizer.apply_gradients([(gradient * 1.0, variable) for gradient, variable in pairs])

    def step_with_a_tape() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w) * factor
        optimizer.apply_gradients(optimizer._compute_gradients(loss, [w], tape=tape))

    def aggregated_step() -> None:
        (gradient,) = optimizer._aggregate_gradients([(tf.ones([2]) * factor, w)])
        optimizer.apply_gradients([(gradient, w)])

    def plain_step() -> None:
        optimizer.apply_gradients([(tf.ones([2]) * factor, w)])

    before, velocity = w.numpy(), 0.0
    for step in (clipped_step, step_with_a_tape, aggregated_step, plain_step):
        for where in (lambda f: f, graph):
            where(step)()
            velocity = 0.5 * velocity - total
            before = before + velocity
            assert np.allclose(w.numpy(), before), (step, w, before)
    for made in (
        optimizer.from_config(optimizer.get_config()),
        type(optimizer).from_config(optimizer.get_config()),
    ):
        assert made.get_config() == optimizer.get_config()
        assert hasattr(made, "register_local_var")
        assert made._farandole_name != optimizer._farandole_name
    raises(ValueError, "`tape` is required", lambda: optimizer.compute_gradients(tf.constant(1.0), [w]))


def check_sync_batch_normalization() -> None:
    size, rank = hvd.size(), hvd.rank()
    rows = [3 + 4 * each for each in range(size)]
    for offset, axis in ((0.0, -1), (1000.0, -1), (0.0, 1)):
        everything = tf.random.stateless_normal([sum(rows), 5, 4], [1, 2]) * 2.0 + offset
        begin = sum(rows[:rank])
        part = slice(begin, begin + rows[rank])
        weights = tf.random.stateless_normal([sum(rows), 5, 4], [3, 4])
        for where in (lambda f: f, graph):
            joined, mine_ = keras.layers.BatchNormalization(axis=axis), hvd.SyncBatchNormalization(axis=axis)

            def run(layer: Any, x: Any, factors: Any) -> Any:
                layer(x, training=False)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer(x, training=True)
                    loss = tf.reduce_sum(y * y * factors)
                return y, *tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

            expected = where(partial(run, joined))(everything, weights)
            found = where(partial(run, mine_))(everything[part], weights[part])
            most = 1e-4 if offset == 0.0 else 2e-2
            for mine_is, all_of in zip(found[:2], expected[:2], strict=True):
                assert np.allclose(mine_is, all_of[part], atol=most), (offset, axis)
            for own, whole in zip(found[2:], expected[2:], strict=True):
                assert np.allclose(hvd.allreduce(own, op=hvd.Sum), whole, atol=50 * most), (offset, axis)
            for name in ("moving_mean", "moving_variance"):
                assert np.allclose(getattr(mine_, name), getattr(joined, name), rtol=1e-5, atol=1e-5), name


def check_training_with_sync_batch_normalization() -> None:
    assert largest_difference(keras, hvd, hvd.SyncBatchNormalization) < 1e-5


def check_tf_keras_beside_keras_3() -> None:
    """A process can hold both Keras. What `hvd.SyncBatchNormalization` is here is of Keras 3."""
    if HAS_KERNEL and importlib.util.find_spec("tf_keras") is not None:
        tf_keras = importlib.import_module("tf_keras")
        assert largest_difference(tf_keras, hvd, sync_batch_normalization_of(tf_keras)) < 1e-5
        of_keras_3 = [(tf.ones([1]), keras.Variable(np.ones(1, "float32"), name="stranger"))]
        for older in (tf_keras.optimizers.SGD(), tf_keras.optimizers.legacy.SGD()):
            optimizer = hvd.DistributedOptimizer(older)
            raises(ValueError, "SGD is an optimizer of tf_keras (Keras 2), and stranger is a variable of Keras 3: "
                   "use keras.optimizers", partial(optimizer.apply_gradients, of_keras_3))  # fmt: skip


def check_what_else_sync_batch_normalization_does() -> None:
    text = "SyncBatchNormalization does not support fused=True."
    for fused in (True, None):
        raises(ValueError, text, partial(hvd.SyncBatchNormalization, fused=fused))
    layer = hvd.SyncBatchNormalization(fused=False)
    assert layer.name.startswith("sync_batch_normalization")
    assert isinstance(layer, tf.keras.layers.BatchNormalization)
    if hvd.rank() == 0:
        layer(mine((4, 2)))  # in inference nothing is exchanged
    masked = hvd.SyncBatchNormalization()
    x = tf.constant([[[1.0], [2.0], [9.0]]]) + hvd.rank()
    masked(x, training=True, mask=tf.constant([[True, True, hvd.rank() == 0]]))
    numbers = np.concatenate([[1.0, 2.0, 9.0], *[[1.0 + rank, 2.0 + rank] for rank in range(1, hvd.size())]])
    assert np.allclose(masked.moving_mean, 0.01 * numbers.mean(), atol=1e-5)
    assert np.allclose(masked.moving_variance, 0.99 + 0.01 * numbers.var(), atol=1e-5)
    empty = hvd.SyncBatchNormalization()
    empty(tf.ones([0 if hvd.rank() else 4, 2]) * 3.0, training=True)  # a rank without rows
    assert np.allclose(empty.moving_mean, 0.03)
    model = keras.Sequential([keras.Input((2,)), hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        again = keras.models.load_model(path)
    assert type(again.layers[0]) is type(model.layers[0])


def check_values_of_keras_that_cannot_travel() -> None:
    """On rank 0 alone: the others go on, and the next operation is the same on all of them."""
    if hvd.rank() == 0:
        sparse = tf.sparse.from_dense([[1.0]])
        for value, text in (
            ("text", "hvd.allreduce: Tensor type <U4 is not supported. Types that travel: numbers and bool"),
            (tf.constant(["text"]), "hvd.allreduce: Tensor type object is not supported"),
            (None, "hvd.allreduce: Tensor type object is not supported"),
            ([[1.0], [2.0, 3.0]], "hvd.allreduce: [[1.0], [2.0, 3.0]] has no values to exchange"),
            (tf.ragged.constant([[1.0], []]), "hvd.allreduce: a RaggedTensor cannot travel; give a dense tensor"),
            (sparse, "hvd.allreduce: a SparseTensor cannot travel; give a dense tensor"),
            (keras.Input((2,)), "hvd.allreduce: a symbolic tensor of Keras has no values"),
        ):
            raises(ValueError, text, partial(hvd_keras.allreduce, value))
        raises(ValueError, "outside graphs: inside of them call hvd.broadcast of farandole.horovod.tensorflow",
               lambda: graph(lambda x: hvd_keras.broadcast(x, 0))(tf.ones([2])))  # fmt: skip
        raises(ValueError, "hvd.broadcast: root_rank='0': expected the number of a rank",
               lambda: hvd_keras.broadcast(1.0, cast(Any, "0")))  # fmt: skip
        raises(ValueError, "hvd.allreduce: prescale_factor='2': expected a number",
               lambda: hvd_keras.allreduce(1.0, prescale_factor=cast(Any, "2")))  # fmt: skip
        raises(ValueError, "hvd.allgather: name=3: expected a text",
               lambda: hvd_keras.allgather([1.0], cast(Any, 3)))  # fmt: skip
    same(hvd_keras.allreduce(mine((3,), "bfloat16"), op=hvd.Sum), tf.add_n(everybody((3,), "bfloat16")))


def check_several_passes_with_a_loss_scale() -> None:
    """As one process that has the gradients of both passes and of all ranks; an infinity is skipped by all."""

    def make(inner: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)

    def gradient(rank: int, number: int) -> Any:
        scaled = 8.0 * mine((4,), rank=rank + number)
        return scaled * (float("inf") if (rank, number) == (1, 2) else 1.0)  # in the second step

    def applied_by(optimizer: Any, variable: Any) -> Callable[[Any], None]:
        return lambda each: optimizer.apply([each], [variable])

    size, passes = hvd.size(), 2
    for where in (lambda f: f, graph):
        w, alone = keras.Variable(np.ones(4, "float32")), keras.Variable(np.ones(4, "float32"))
        one = make(keras.optimizers.SGD(0.25, momentum=0.9))
        several = hvd.DistributedOptimizer(
            make(keras.optimizers.SGD(0.25, momentum=0.9)), backward_passes_per_step=passes
        )
        run = where(applied_by(several, w))
        for step in range(4):
            numbers = range(step * passes, (step + 1) * passes)
            for number in numbers:
                run(gradient(hvd.rank(), number))
            one.apply([tf.add_n([gradient(r, n) for r in range(size) for n in numbers]) / float(size)], [alone])
            assert np.allclose(w, alone, rtol=1e-6), (step, w, alone)
            assert float(several.dynamic_scale) == float(one.dynamic_scale) == [8.0, 4.0, 4.0, 8.0][step]
        assert int(several.iterations) == 4 * passes - 1, "but for the step that was skipped"
    both_add = make(keras.optimizers.SGD(gradient_accumulation_steps=2))
    raises(ValueError, "gradient_accumulation_steps=2 both add up gradients", lambda: (
        hvd.DistributedOptimizer(both_add, backward_passes_per_step=2)))  # fmt: skip


def check_groups_and_variables_that_are_none() -> None:
    if hvd.rank():
        return
    x = tf.ones([2, 2])
    grouped: Any
    for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        raises(INVALID, "is no group; give a list or tuple of tensors", partial(grouped, x))
        raises(INVALID, "'text' is no group", partial(grouped, "text"))
    raises(INVALID, "Tensor type string is not supported", lambda: hvd.grouped_allreduce([x, "text"]))
    raises(ValueError, "op=[]: expected Average", lambda: hvd.allreduce(x, op=cast(Any, [])))
    overwrite: Any
    for overwrite in (hvd.broadcast_variables, hvd.broadcast_):
        for variables in ("text", None, tf.Variable(1.0), keras.Sequential([keras.layers.Dense(1)])):
            raises(ValueError, "expected a list of variables", partial(overwrite, variables, 0))
        raises(ValueError, "number 1 is array", partial(overwrite, [tf.Variable(1.0), np.ones(2)], 0))


def check_models_without_trainable_weights() -> None:
    frozen = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    frozen.trainable = False
    frozen.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    before = frozen.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert all(map(np.array_equal, before, frozen.get_weights()))


def check_names_made_inside_an_elastic_function() -> None:
    def made() -> str:
        name: str = hvd.DistributedOptimizer(keras.optimizers.SGD())._farandole_name
        return name

    outside, seen = made(), []

    def train(_: Any) -> None:
        seen.append([made(), made()])
        if len(seen) < 3:
            raise HorovodInternalError("as if a rank were gone")

    hvd.elastic.run(train)(hvd.elastic.TensorFlowState([tf.Variable(1.0)]))
    assert len({outside, *seen[0]}) == 3
    assert seen[0] == seen[1] == seen[2], seen  # a new rank would make them for the first time
    hvd.shutdown()
    hvd.init(process_sets="dynamic")

"""Played by test_tensorflow.py: checks of `horovod.tensorflow` on real ranks, in one process each.

``python -m tests.ranks.tensorflow_script RESULTS.json``: every function whose name begins with ``check_``, here
and in `tensorflow_strange`, is run on all ranks in turn, and the file has what the ranks said of it: nothing, or a
traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import tensorflow as tf

import farandole.horovod.tensorflow as hvd
from farandole.comm.world.world import world
from farandole.core.vocabulary.events import Exchange, Phase, StepDone
from tests.ranks import tensorflow_strange
from tests.ranks.tensorflow_tools import DISAGREE, HAS_KERNEL, both, everybody, graph, mine, raises, same

TYPES = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
LARGE = 70_000


def check_allreduce_of_all_types() -> None:
    for dtype in TYPES:
        for count in (0, 1, 33, LARGE):
            x = mine((count,), dtype)
            total = tf.add_n(everybody((count,), dtype))
            for found in both(lambda x: hvd.allreduce(x, op=hvd.Sum), x):
                same(found, total)
            same(x, mine((count,), dtype))  # what went in is left alone


def check_reductions() -> None:
    x, parts = mine((3, 4)), tf.stack(everybody((3, 4)))
    for op, expected in (
        (hvd.Average, tf.reduce_mean(parts, 0)),
        (hvd.Min, tf.reduce_min(parts, 0)),
        (hvd.Max, tf.reduce_max(parts, 0)),
        (hvd.Product, tf.reduce_prod(parts, 0)),
    ):
        for found in both(lambda x, op=op: hvd.allreduce(x, op=op), x):
            same(found, expected)
    for found in both(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), x):
        same(found, tf.reduce_sum(parts, 0) * 2)


def check_bool_and_complex_numbers_travel() -> None:
    rank = hvd.rank()
    for found in both(hvd.allgather, tf.constant([rank == 0, True])):
        same(found, tf.concat([[r == 0, True] for r in range(hvd.size())], 0))
    for found in both(lambda x: hvd.broadcast(x, 1), tf.constant([rank == 1, rank != 1])):
        same(found, tf.constant([True, False]))
    x = tf.complex(mine((3,)), mine((3,)) + 1)
    for found in both(lambda x: hvd.allreduce(x, op=hvd.Sum), x):
        parts = tf.add_n(everybody((3,)))
        same(found, tf.complex(parts, parts + hvd.size()))


def check_allgather_of_other_numbers_of_rows() -> None:
    rows = [3 + rank for rank in range(hvd.size())]
    for width in (2, LARGE // 3):
        x = mine((rows[hvd.rank()], width))
        expected = tf.concat([mine((rows[rank], width), rank=rank) for rank in range(hvd.size())], 0)
        for found in both(hvd.allgather, x):
            same(found, expected)
        for found in both(lambda x: hvd.grouped_allgather([x, x + 1])[1], x):
            same(found, expected + 1)


def check_broadcast() -> None:
    for shape in ((), (5,), (LARGE,)):
        x = mine(shape)
        for found in both(lambda x: hvd.broadcast(x, hvd.size() - 1), x):
            same(found, mine(shape, rank=hvd.size() - 1))
        same(x, mine(shape))


def check_alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = mine((size * (size + 1) // 2, 2))
    splits = tf.range(1, size + 1)
    for output, received in both(hvd.alltoall, x, splits):
        begin = rank * (rank + 1) // 2
        parts = [mine(x.shape, rank=r)[begin : begin + rank + 1] for r in range(size)]
        same(output, tf.concat(parts, 0))
        same(received, tf.fill([size], rank + 1))


def check_reducescatter() -> None:
    size, rank = hvd.size(), hvd.rank()
    x, total = mine((2 * size + 1, 3)), tf.add_n(everybody((2 * size + 1, 3)))
    begin, end = (0, 3) if rank == 0 else (1 + 2 * rank, 3 + 2 * rank)
    for found in both(lambda x: hvd.reducescatter(x, op=hvd.Sum), x):
        same(found, total[begin:end])
    for found in both(lambda x: hvd.grouped_reducescatter([x, x * 2], op=hvd.Sum)[1], x):
        same(found, 2 * total[begin:end])


def check_static_shapes() -> None:
    shapes = []

    @graph
    def traced(x: Any) -> None:
        shapes.append([hvd.allreduce(x).shape, hvd.broadcast(x, 0).shape, hvd.allgather(x).shape])

    traced(mine((3, 4)))
    assert [shape.as_list() for shape in shapes[0]] == [[3, 4], [3, 4], [None, 4]], shapes


def check_gradients_of_operations() -> None:
    size, rank = hvd.size(), hvd.rank()

    def gradient(operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = operation(x)
                loss = tf.reduce_sum(y * (rank + 1.0))
            return tape.gradient(loss, x)

        return run

    x, factors = mine((2 * size, 2)), [r + 1.0 for r in range(size)]
    ones = tf.ones_like(x)
    for operation, expected in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum), ones * sum(factors)),
        (hvd.allreduce, ones * sum(factors) / size),
        (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[0], ones * sum(factors)),
        (hvd.allgather, ones * sum(factors) / size),
        (lambda x: hvd.broadcast(x, 1), ones * (sum(factors) / size if rank == 1 else 0.0)),
        (lambda x: hvd.alltoall(x, tf.fill([size], 1))[0],
         tf.concat([tf.repeat(tf.constant(factors), 1)[:, None] * tf.ones([1, 2]), tf.zeros([size, 2])], 0)),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum),
         size * tf.repeat(tf.constant(factors), 2)[:, None] * tf.ones([1, 2])),
    ):  # fmt: skip
        for found in both(gradient(operation), x):
            same(found, tf.cast(expected, tf.float32))

    def narrow_gradient(wide: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(wide)
            received = hvd.alltoall(wide)
        # It is float32, though the tensor is float64; and from outside the graph, with another name on each rank.
        return tape.gradient(received, wide, ones)

    for found in both(narrow_gradient, tf.cast(x, tf.float64)):
        same(found, ones)


def check_indexed_slices() -> None:
    size, rank = hvd.size(), hvd.rank()
    values, indices = mine((2, 3)), tf.constant([rank, 5])
    for op, divisor in ((hvd.Sum, 1.0), (hvd.Average, float(size))):

        def reduce(values: Any, indices: Any, op: int = op) -> Any:
            return hvd.allreduce(tf.IndexedSlices(values, indices, dense_shape=tf.constant([9, 3])), op=op)

        for found in both(reduce, values, indices):
            same(found.values, tf.concat(everybody((2, 3)), 0) / divisor)
            same(found.indices, tf.reshape(tf.constant([[r, 5] for r in range(size)]), [-1]))
    slices = tf.IndexedSlices(values, indices, dense_shape=tf.constant([9, 3]))
    mixed = hvd.grouped_allreduce([mine((4,)), slices], op=hvd.Sum)
    same(mixed[0], tf.add_n(everybody((4,))))
    same(mixed[1].values, tf.concat(everybody((2, 3)), 0))


def check_nothing_is_folded_or_merged() -> None:
    runs = tf.Variable(0.0)

    @graph
    def constant() -> tuple[Any, Any, Any]:
        one = tf.ones([3])
        a, b = hvd.allreduce(one, op=hvd.Sum, name="a"), hvd.allreduce(one, op=hvd.Sum, name="b")
        return a, b, hvd.allgather(tf.fill([1], runs), name="c")

    for number in range(3):
        runs.assign(float(number + 10 * hvd.rank()))  # only an exchange that is run again sees it
        a, b, c = constant()
        same(a, tf.fill([3], float(hvd.size())))
        same(b, tf.fill([3], float(hvd.size())))
        same(c, tf.constant([float(number + 10 * rank) for rank in range(hvd.size())]))
    text = str(cast(Any, constant).get_concrete_function().graph.as_graph_def())
    assert text.count('op: "FarandoleExchange"') == (3 if HAS_KERNEL else 0)


def check_operations_in_other_orders() -> None:
    """Sixteen, submitted in opposite orders by two ranks, by threads and in one graph: none waits for another."""
    order = list(range(16))
    turned = order if hvd.rank() % 2 == 0 else order[::-1]
    with ThreadPoolExecutor(16) as pool:  # outside graphs an operation waits where it is called
        futures = {n: pool.submit(hvd.allreduce, tf.fill([5], 1.0 + n), op=hvd.Sum, name=f"t{n}") for n in turned}
        for n in order:
            same(futures[n].result(), tf.fill([5], (1.0 + n) * hvd.size()))
    if not HAS_KERNEL:
        return  # Python functions run one after the other: the order of a script is that of all ranks

    @graph
    def step(x: Any) -> list[Any]:
        found = {}
        for number in turned:
            found[number] = hvd.allreduce(x + number, op=hvd.Sum, name=f"n{number}")
        return [found[number] for number in order]

    for _ in range(5):
        for number, result in enumerate(step(tf.ones([5]))):
            same(result, tf.fill([5], (1.0 + number) * hvd.size()))


def check_a_session_of_tensorflow_1_is_refused() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=mine((3,)))
        for call in (
            lambda: hvd.allreduce(tf.ones([3])),
            lambda: hvd.broadcast_global_variables(0),
            lambda: hvd.broadcast_variables([variable], 0),
            lambda: hvd.broadcast_([variable], 0),
            lambda: hvd.BroadcastGlobalVariablesHook(0),
            lambda: hvd.elastic.TensorFlowState(session=object()),
            lambda: hvd.elastic.TensorFlowState([variable]),
        ):
            raises(NotImplementedError, "sessions of TensorFlow 1 are not supported", call)
    raises(NotImplementedError, "AdamOptimizer is an optimizer of tf.compat.v1.train",
           lambda: hvd.DistributedOptimizer(v1.train.AdamOptimizer()))  # fmt: skip
    raises(RuntimeError, "broadcast_variables", lambda: hvd.broadcast_global_variables(0))


def check_tape() -> None:
    w, table = tf.Variable(mine((3, 5))), tf.Variable(mine((7, 2)))
    hvd.broadcast_variables([w, table], 0)
    same(w.value(), mine((3, 5), rank=0))

    def step(x: Any, words: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(x, w)) + tf.reduce_sum(tf.gather(table, words) * 2.0)
        tape = hvd.DistributedGradientTape(tape)
        assert type(tape).__name__ == "GradientTape"
        return tape.gradient(loss, [w, table])

    x, words = mine((4, 3)), tf.constant([1, 1, 2 + hvd.rank()])
    for dense, sparse in both(step, x, words):
        expected = tf.reduce_mean(tf.stack([tf.reduce_sum(e, 0) for e in everybody((4, 3))]), 0)
        same(dense, tf.repeat(expected[:, None], 5, 1))
        assert isinstance(sparse, tf.IndexedSlices)
        assert len(set(sparse.indices.numpy().tolist())) == len(sparse.indices), "equal rows are one"
        rows = [0.0] * 7
        for rank in range(hvd.size()):
            for word in (1, 1, 2 + rank):
                rows[word] += 2.0 / hvd.size()
        same(tf.convert_to_tensor(sparse), tf.repeat(tf.constant(rows)[:, None], 2, 1))


def check_two_tapes_in_one_step() -> None:
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])

    @graph
    def step(x: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            one, two = tf.reduce_sum(a * x), tf.reduce_sum(b * x)
        return (
            hvd.DistributedGradientTape(first).gradient(one, a),
            hvd.DistributedGradientTape(second, op=hvd.Sum).gradient(two, [b])[0],
        )

    for _ in range(3):
        one, two = step(tf.constant([1.0, 2.0]) * (hvd.rank() + 1))
        factors = sum(rank + 1 for rank in range(hvd.size()))
        same(one, tf.constant([1.0, 2.0]) * factors / hvd.size())
        same(two, tf.constant([[3.0]]) * factors)


def check_compression() -> None:
    x = tf.random.stateless_normal([64, 128], [3, hvd.rank()])
    exact = hvd.allreduce(x)
    for compression, most in (
        (hvd.Compression.fp16, 2e-3),
        (hvd.Compression.bf16, 2e-2),
        (hvd.Compression.int8, 0.05),
    ):
        for number, found in enumerate(both(lambda x, c=compression: hvd.allreduce(x, compression=c), x)):
            error = float(tf.reduce_max(tf.abs(found - exact)))
            assert 0 < error < most, (compression, number, error)
    w = tf.Variable(tf.zeros([64, 128]))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return hvd.DistributedGradientTape(tape, compression=hvd.Compression.int8).gradient(loss, w)

    for found in both(step, x):
        assert 0 < float(tf.reduce_max(tf.abs(found - exact))) < 0.05


def check_a_gradient_is_exchanged_once() -> None:
    import keras

    w = tf.Variable([2.0, 3.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w)
    gradients = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [w])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
    same(w.value(), tf.constant([2.0, 3.0]) - hvd.size())
    assert any("exchanged already" in str(each.message) for each in seen), seen


def check_ranks_that_disagree() -> None:
    shape = [2 + hvd.rank()]
    for where in (lambda f: f, tf.function):
        reduce = where(partial(hvd.allreduce, name="differ"))
        raises(DISAGREE, "rank 1", partial(reduce, tf.ones(shape)))
        same(reduce(tf.ones([2])), tf.ones([2]))  # and the job goes on


def check_models_that_differ() -> None:
    a, b = tf.Variable(tf.ones([2, 8])), tf.Variable(tf.ones([8, 2]))
    variables = [a, b] if hvd.rank() == 0 else [b, a]  # buffers of equal length
    for where in (lambda f: f, tf.function):

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(a) + tf.reduce_sum(b)
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)

        raises(DISAGREE, "gradient 0 is float32[2, 8]", where(step))
    raises(Exception, "broadcast of variables", lambda: hvd.broadcast_variables(variables, 0))


def check_bad_input() -> None:
    invalid = tf.errors.InvalidArgumentError
    raises(invalid, "string", lambda: hvd.allreduce(tf.constant(["a"])))
    raises(ValueError, "RaggedTensor", lambda: hvd.allreduce(tf.ragged.constant([[1], [2, 3]])))
    raises(ValueError, "scalar", lambda: hvd.allgather(tf.constant(1.0)))
    raises(ValueError, "scalar", lambda: hvd.reducescatter(tf.constant(1.0)))
    raises(ValueError, "int32", lambda: hvd.alltoall(mine((4,)), tf.constant([1, 1], tf.int64)))
    raises(invalid, "one dimension", lambda: hvd.alltoall(mine((4,)), tf.fill([1, 2], 1)))
    raises(invalid, "negative", lambda: hvd.alltoall(mine((4,)), tf.constant([-1, *[1] * (hvd.size() - 1)])))
    raises(invalid, "greater", lambda: hvd.alltoall(mine((1,)), tf.fill([hvd.size()], 5)))
    raises(invalid, "bool", lambda: hvd.allreduce(tf.constant([True, False])))
    raises(ValueError, "supersedes", lambda: hvd.allreduce(mine((1,)), average=True, op=hvd.Sum))
    raises(ValueError, "predivide", lambda: hvd.DistributedGradientTape(
        tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0))  # fmt: skip
    raises(NotImplementedError, "IndexedSlices", lambda: hvd.allreduce(
        tf.IndexedSlices(mine((2, 2)), tf.constant([0, 1])), op=hvd.Max))  # fmt: skip
    raises(AttributeError, "int8", lambda: hvd.Compression.in8)

    @partial(graph, jit_compile=True)
    def compiled(x: Any) -> Any:
        return hvd.allreduce(x)

    raises(ValueError, "jit_compile=False", lambda: compiled(mine((3,))))

    raises(ValueError, "expected an optimizer", lambda: hvd.DistributedOptimizer(object()))


def check_optimizers_that_are_refused() -> None:
    import keras

    sgd = keras.optimizers.SGD
    raises(ValueError, "got the class SGD", lambda: hvd.DistributedOptimizer(sgd))
    once = hvd.DistributedOptimizer(sgd(0.1))
    raises(ValueError, "distributed already", lambda: hvd.DistributedOptimizer(once))
    raises(
        ValueError, "backward_passes_per_step", lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)
    )
    w = tf.Variable([1.0])
    inside = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd(0.1)))
    raises(ValueError, "from outside", lambda: inside.apply([tf.constant([1.0])], [w]))
    doubled = hvd.DistributedOptimizer(sgd(0.1), groups=[[w, w]])
    raises(ValueError, "twice", lambda: doubled.apply([tf.constant([1.0])], [w]))
    stranger = hvd.DistributedOptimizer(sgd(0.1), groups=[[tf.Variable([2.0], name="stranger")]])
    raises(ValueError, "stranger", lambda: stranger.apply([tf.constant([1.0])], [w]))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        raises(ValueError, "OneDeviceStrategy", lambda: hvd.DistributedOptimizer(sgd(0.1)))


def check_several_backward_passes() -> None:
    import keras

    for averages, divisor in ((False, 1.0), (True, 3.0)):
        w = tf.Variable([10.0, 20.0])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=3, average_aggregated_gradients=averages
        )

        @graph
        def step(x: Any, optimizer: Any = optimizer, w: Any = w) -> None:
            optimizer.apply([x], [w])

        optimizer.build([w])
        ones = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)
        mean = tf.constant([1.0, 2.0]) * sum(rank + 1 for rank in range(hvd.size())) / hvd.size()
        for number in range(1, 7):
            (step if number < 5 else cast(Any, step).python_function)(ones)
            same(w.value(), tf.constant([10.0, 20.0]) - mean * float(number // 3 * 3) / divisor)
            assert int(optimizer._agg_helper.counter) == number % 3
            assert int(optimizer.iterations) == number
        for number in range(6):  # an infinity is gone after its step
            step(ones * float("inf") if number == 1 and hvd.rank() == 1 else ones)
            if number == 2:
                w.assign([10.0, 20.0])
        same(w.value(), tf.constant([10.0, 20.0]) - mean * 3 / divisor)


def check_an_infinity_on_one_rank() -> None:
    import keras

    w = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))

    @graph
    def step(x: Any) -> None:
        optimizer.apply([w * 0 + x], [w])

    step(tf.constant([float("inf") if hvd.rank() == 1 else 1.0, 1.0]))
    same(w.value(), tf.constant([1.0, 2.0]))  # all ranks left the step out
    scales = hvd.allgather_object(float(optimizer.dynamic_scale))
    assert len(set(scales)) == 1, scales
    assert scales[0] == optimizer.initial_scale / 2, scales


def check_records_of_a_loop() -> None:
    session = world().session
    kept, seen = session.recorder, []

    class Listening:
        def record(self, event: Any) -> None:
            seen.append(event)
            kept.record(event)

    w = tf.Variable(tf.zeros([LARGE]))

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        w.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, w))

    traced = graph(step)
    session.recorder = Listening()
    try:
        for _ in range(4):
            traced(mine((LARGE,)))
        for _ in range(3):
            step(mine((LARGE,)))
    finally:
        session.recorder = kept
    exchanges = [event for event in seen if isinstance(event, Exchange)]
    assert [exchange.sent_bytes for exchange in exchanges] == [4 * LARGE] * 7, exchanges
    assert all(len(exchange.buckets) == 1 for exchange in exchanges)
    assert all(each.wait_begin_seconds <= each.wait_end_seconds for each in exchanges)
    steps = [event for event in seen if isinstance(event, StepDone)]
    assert len(steps) in (6, 7), "another optimizer may have led before"
    assert [phase.name for phase in seen if isinstance(phase, Phase)].count("undivided") == len(steps)


def check_process_sets() -> None:
    everyone, first = hvd.ProcessSet(list(range(hvd.size()))), hvd.add_process_set([0])
    assert first.process_set_id == 1
    if hvd.rank() == 0:
        for found in both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=first), mine((3,))):
            same(found, mine((3,)))
    else:
        raises(
            tf.errors.InvalidArgumentError, "not a member", lambda: hvd.allreduce(mine((3,)), process_set=first)
        )
    raises(ValueError, "not been registered", lambda: hvd.allreduce(mine((3,)), process_set=everyone))
    for found in both(lambda: hvd.process_set_included_op(1)):
        assert int(found) == int(hvd.rank() == 0)
    assert hvd.remove_process_set(first)


def check_scalars_and_objects() -> None:
    for found in both(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]):
        assert [int(each) for each in found] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    assert hvd.broadcast_object({"from": hvd.rank()}, 1) == {"from": 1}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_join() -> None:
    for step in range(hvd.rank() + 1):
        hvd.allreduce(tf.ones([3]), name=f"joined{step}")
    assert int(hvd.join()) == hvd.size() - 1


def check_shutdown_and_begin_again() -> None:
    @graph
    def step(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name="again")

    expected = tf.fill([3], float(hvd.size()))
    for _ in range(20 if HAS_KERNEL else 5):
        same(step(tf.ones([3])), expected)
        hvd.shutdown()
        raises((tf.errors.OpError, ValueError), "not been initialized", lambda: step(tf.ones([3])))
        raises(ValueError, "not been initialized", lambda: hvd.allreduce(tf.ones([3])))
        hvd.init(process_sets="dynamic")
    # The number of a set from before a shutdown may be another set's.
    old = hvd.add_process_set([0])
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    other = hvd.add_process_set([1])
    assert old.process_set_id == other.process_set_id
    raises(ValueError, "not been registered", lambda: hvd.allreduce(tf.ones([1]), process_set=old))
    raises(ValueError, "not been registered", old.size)


def main() -> None:
    hvd.init(process_sets="dynamic")
    both_files = {**globals(), **vars(tensorflow_strange)}
    *wanted, results = sys.argv[1:]
    checks = [(name, value) for name, value in both_files.items() if name.startswith("check_")]
    checks = [(name, value) for name, value in checks if not wanted or name.removeprefix("check_") in wanted]
    told: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the missing compiler
        for name, check in checks:
            try:
                check()
                told[name] = ""
            except (Exception, pytest.fail.Exception):
                told[name] = traceback.format_exc()
            problems = hvd.allgather_object(told[name])
            print(name, "ok" if not any(problems) else problems, flush=True)
            told[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
    if hvd.rank() == 0:
        Path(results).write_text(json.dumps(told))
    hvd.shutdown()


if __name__ == "__main__":
    main()

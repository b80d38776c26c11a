"""One rank of `tensorflow_front_end`: trains Keras models with `fit` and times steps, or times small operations.

Prints nothing of its own: rank 0 writes what it found as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from farandole.bench.intervals import sent_bytes
from shared import seconds_of, take_turns, worker_parser, write_found

WIDTHS = {
    "small": [128] * 51 + [10],
    "mlp": [784, 2048, 2048, 10],
    "large": [784, 4480, 4480, 10],
}
"""Layer sizes: 102 tensors of 3.3 MB in all, 6 tensors of 23.3 MB, 6 tensors of 94.6 MB."""
BATCH = 64
"""Of one rank."""
WARM_UP_STEPS = 1
"""Of each block: the first step of a `fit` makes its iterator. The first block is warm-up as a whole."""
FIRST_STEPS = {"auto": 6}
"""Of the first block, after the warm-up: until codecs are chosen and used. 1 of the others."""
AUTO_PLAN = 'codec = "auto"\nlossy = true\n'
SMALL_FLOATS = 1000
"""4 kB."""
RANK = int(os.environ.get("RANK", "0"))

Blocks = list[list[float]]


class Training:
    """One model that is compiled for one way to exchange gradients, and its steps."""

    def __init__(self, tf: Any, name: str, make_optimizer: Callable[[], Any], strategy: Any = None) -> None:
        self._tf = tf
        if strategy is None:
            self._model = self._compiled(name, make_optimizer())
            self._data = dataset(tf, name)
        else:
            with strategy.scope():
                self._model = self._compiled(name, make_optimizer())
            self._data = strategy.distribute_datasets_from_function(lambda _: dataset(tf, name))

    def _compiled(self, name: str, optimizer: Any) -> Any:
        layers = self._tf.keras.layers
        self._tf.keras.utils.set_random_seed(1)
        sizes = WIDTHS[name]
        hidden = [layers.Dense(size, activation="relu", kernel_initializer="he_normal") for size in sizes[1:-1]]
        model = self._tf.keras.Sequential([layers.Input((sizes[0],)), *hidden, layers.Dense(sizes[-1])])
        loss = self._tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)
        return model

    def block(self, steps: int) -> tuple[list[float], float]:
        """Train `steps` steps after the warm-up; return their seconds, and the bytes sent in one of them."""
        moments: list[tuple[float, int]] = []

        def note(*_: Any, **__: Any) -> None:
            moments.append((time.perf_counter(), sent_bytes(loopback=False)))

        watch = type("Watch", (self._tf.keras.callbacks.Callback,), {"on_train_batch_end": note})
        count = steps + WARM_UP_STEPS
        self._model.fit(self._data, steps_per_epoch=count, epochs=1, shuffle=False, verbose=0, callbacks=[watch()])
        kept = moments[WARM_UP_STEPS - 1 :]
        seconds = [after[0] - before[0] for before, after in pairwise(kept)]
        return seconds, (kept[-1][1] - kept[0][1]) / len(seconds)


def dataset(tf: Any, name: str) -> Any:
    """Return one batch, again and again: what an input pipeline costs is not asked here."""
    draw = np.random.default_rng(RANK)
    x = draw.normal(size=(BATCH, WIDTHS[name][0])).astype("float32")
    y = draw.integers(0, 10, size=BATCH)
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def import_tensorflow(*, legacy: bool) -> Any:
    os.environ["TF_USE_LEGACY_KERAS"] = "1" if legacy else "0"
    os.environ["KERAS_BACKEND"] = "tensorflow"
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(name, None)  # gRPC would take them for the other rank
    return importlib.import_module("tensorflow")


def make_trainings(options: argparse.Namespace, name: str) -> dict[str, Training]:
    """Return the contenders of one model by name, compiled."""
    if options.kind == "mwms":
        tf = import_tensorflow(legacy=True)
        return {"mwms": Training(tf, name, lambda: tf.keras.optimizers.SGD(1e-3), strategy_of(tf))}
    tf = import_tensorflow(legacy=options.kind == "tf_keras")
    hvd = importlib.import_module("farandole.horovod.tensorflow.keras")
    if not hvd.is_initialized():
        if options.contenders == "auto":
            plan = options.output.with_name(f"auto{RANK}.toml")
            plan.write_text(AUTO_PLAN)
            os.environ["FARANDOLE_PLAN"] = str(plan)
        hvd.init()

    def make_optimizer(contender: str) -> Any:
        optimizer = tf.keras.optimizers.SGD(1e-3)
        if contender == "alone":
            return optimizer
        exact = contender in {"exact", "auto"}  # "auto": its plan says more
        codec = hvd.Compression.none if exact else getattr(hvd.Compression, contender)
        return hvd.DistributedOptimizer(optimizer, compression=codec)

    names = options.contenders.split(",")
    return {contender: Training(tf, name, partial(make_optimizer, contender)) for contender in names}


_strategies: list[Any] = []


def strategy_of(tf: Any) -> Any:
    """Return the one strategy of this process: TensorFlow meets the other workers once."""
    if not _strategies:
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        _strategies.append(tf.distribute.MultiWorkerMirroredStrategy(communication_options=options))
    return _strategies[0]


def time_trainings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the steps of every model and contender, in blocks that take turns."""
    if options.kind == "mwms":
        worker = {"worker": options.peers.split(",")}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": worker, "task": {"type": "worker", "index": RANK}})
    results: dict[str, Any] = {}
    for text in options.models.split(","):
        name, _, count = text.partition(":")
        trainings = make_trainings(options, name)
        for contender, training in trainings.items():
            training.block(FIRST_STEPS.get(contender, WARM_UP_STEPS))
        calls = {contender: partial(training.block, int(count)) for contender, training in trainings.items()}
        blocks: dict[str, Blocks] = {}
        sent: dict[str, list[float]] = {}
        for contender, found in take_turns(calls, options.blocks, warm_up=0).items():
            blocks[contender] = [seconds for seconds, _ in found]
            sent[contender] = [byte_count for _, byte_count in found]
        results[name] = {"seconds": blocks, "sent_bytes": sent}
    return results


def time_operations(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of small operations on several ranks; contenders take turns."""
    tf = import_tensorflow(legacy=False)
    torch = importlib.import_module("torch")
    hvd = importlib.import_module("farandole.horovod.tensorflow")
    hvd_torch = importlib.import_module("farandole.horovod.torch")
    hvd.init()
    tensor, other = tf.ones(SMALL_FLOATS), torch.ones(SMALL_FLOATS)
    in_graph = tf.function(lambda x: hvd.allreduce(x, name="graph"))
    empty_graph = tf.function(tf.identity)
    return time_in_turns(
        {
            "eager": lambda: hvd.allreduce(tensor, name="eager"),
            "graph": lambda: in_graph(tensor),
            "graph without it": lambda: empty_graph(tensor),
            "torch": lambda: hvd_torch.allreduce(other, name="torch"),
        },
        options,
    )


def time_in_turns(
    operations: dict[str, Callable[[], object]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of each call."""
    blocks = {name: partial(seconds_of, call, options.calls) for name, call in operations.items()}
    return {name: list(chain.from_iterable(found)) for name, found in take_turns(blocks, options.blocks).items()}


def time_one_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Return the steps of a world of one, plain and distributed, and one operation in a graph."""
    found: dict[str, Any] = {"fit": time_trainings(options)}
    tf = import_tensorflow(legacy=False)
    hvd = importlib.import_module("farandole.horovod.tensorflow")
    tensor = tf.ones(SMALL_FLOATS)
    with_it = tf.function(lambda x: hvd.allreduce(x * 2.0, name="one"))
    without = tf.function(lambda x: x * 2.0)
    found["graph"] = time_in_turns({"with": lambda: with_it(tensor), "without": lambda: without(tensor)}, options)
    return found


def time_compiler(_: argparse.Namespace) -> dict[str, float]:
    """Return what it takes to make the operation where the cache is empty, and to find it there again."""
    import_tensorflow(legacy=False)
    library = importlib.import_module("farandole.horovod.tensorflow.ops.call")
    before, begin = children_seconds(), time.perf_counter()
    if library.find_library() is None:
        raise SystemExit("tensorflow_front_end: the operation could not be made, see above")
    return {"wall_seconds": time.perf_counter() - begin, "cpu_seconds": children_seconds() - before}


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


KINDS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "keras": time_trainings,
    "auto": time_trainings,
    "tf_keras": time_trainings,
    "mwms": time_trainings,
    "operations": time_operations,
    "one": time_one_rank,
    "compiler": time_compiler,
}


def main() -> None:
    parser = worker_parser(
        __doc__,
        models=("small:20", "model:steps of a block, ..."),
        contenders=("alone,exact", "names, or auto alone: it has a plan"),
        blocks=3,
        calls=(100, "of a small operation in one block"),
        peers=("", "host:port of each rank, for MultiWorkerMirroredStrategy"),
    )
    parser.add_argument("kind", choices=sorted(KINDS))
    options = parser.parse_args()
    if options.kind in {"one", "compiler"}:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as the launcher binds a rank
    try:
        found = KINDS[options.kind](options)
    except (AttributeError, NotImplementedError) as refused:
        if options.kind != "tf_keras":
            raise
        found = {"refused": str(refused)}  # not supported yet
    write_found(found, options)


if __name__ == "__main__":
    main()

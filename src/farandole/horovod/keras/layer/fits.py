"""Where a training of Keras is watched: around the function that `fit` and `train_on_batch` call for each step.

`Model.make_train_function` makes that function, in Keras 3 on every backend and in tf_keras; ours calls it and
puts a function around what it made. A callback would see neither the batch nor `train_on_batch`, and a script
would have to add it.

[Note: the batch] On TensorFlow a batch is seen inside a graph alone. So while `make_train_function` runs, the
model's `train_step` is one that shows the batch first, by a Python function in a branch that is taken only while
an observer wants the batch. On torch the batch is an argument.

[Note: the wait for the batch] For the records, `train_step` also marks when its batch was there, on one rank too.

[Note: tf_keras] It looks for the model's `train_step` when TensorFlow makes the graph: in the first call, and
where a batch has another shape. So ours takes its place in each call.

Models are watched on TensorFlow and on torch. Where nothing is to be seen (no `hvd.init`, an optimizer that is not
distributed, one rank without records) Keras does what it does without us.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ....comm.world.world import World
from ....core.vocabulary.text import write_notice
from ....train.equal_models import ModelDigests
from ....train.loop import rank_seed
from ....train.same_data import BatchDigests
from ...array_verification import Array, ArrayVerification, digest_of, find_verification, leaves_of
from ...common.running import find_running
from ...exchange.names import key_of
from ...exchange.step_watch import tell
from ..variables import as_numpy, is_legacy

_BACKENDS = ("tensorflow", "torch")
_MARK = "_farandole_is_watched"


class FitObserver(Protocol):
    """Looks at the trainings of one world."""

    @property
    def wants_batch(self) -> bool:
        """Whether the next batch is to be shown."""

    def begins(self, model: Any, calls: int) -> None:
        """A step is about to be made; or several, with ``steps_per_execution``.

        `calls`: of the same train function before.
        """

    def batch(self, arrays: Sequence[Array], *, weighs: bool) -> None:
        """These arrays are its batch. May be called by a thread of TensorFlow's.

        `weighs`: whether there are sample weights among them.
        """

    def ends(self, model: Any, steps: int) -> None:
        """The step is done; so many, with ``steps_per_execution``."""


def watch_fits() -> None:
    """Watch the trainings of all models of Keras 3 from now on. May be called again."""
    import keras

    if keras.__version__.split(".")[0] == "3":
        _watch(keras.Model)
        guard_files(keras, is_3=True)


def watch_legacy_fits(keras: Any) -> None:
    """The same for tf_keras."""
    _watch(keras.Model)
    guard_files(keras, is_3=False)


def _watch(kind: Any) -> None:
    plain = kind.make_train_function
    if getattr(plain, _MARK, False):
        return

    @functools.wraps(plain)
    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return plain(self, force)
        if backend_of(self) in _BACKENDS:
            return _Watched(self).make(plain, force)
        return plain(self, force)

    setattr(make_train_function, _MARK, True)
    kind.make_train_function = make_train_function


def _observers(here: World, model: Any) -> list[FitObserver]:
    """Return who looks at a model in a world: the same for all steps of the world."""
    verification = find_verification(here)
    if verification is not None:
        return [here.session.keep(FitVerification, lambda: FitVerification(verification))]
    if here.size > 1 and is_distributed(model):
        return [here.session.keep(Guards, lambda: Guards(here))]
    return []


def _here() -> World | None:
    running = find_running()
    return None if running is None or running.world.in_forked_child else running.world


def _observers_here(model: Any) -> list[FitObserver]:
    here = _here()
    return [] if here is None else _observers(here, model)


class _Watched:
    """The train function of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._on_tensorflow = backend_of(model) == "tensorflow"
        self._is_legacy = is_legacy(type(model))
        self._marks = False
        """Whether the step marks when its batch was there."""
        self._is_single = False
        """Whether a call makes one step."""
        self._gate: Any = None
        """A variable of TensorFlow's: whether the graph shows its batch. None: it never does."""
        self._is_open = False
        self._calls = 0

    def make(self, plain: Any, force: bool) -> Any:
        model, here = self._model, _here()
        watches = here is not None and bool(_observers(here, model))
        self._marks = here is not None and self._on_tensorflow and _is_recorded()
        if here is None or not (watches or self._marks):
            return plain(model, force)
        if find_verification(here) is not None:
            model.jit_compile = False  # a Python function cannot be inside an XLA program
            model.steps_per_execution = 1  # each step is compared
        if watches and self._on_tensorflow and not model.jit_compile:
            self._make_gate()
        with nullcontext() if self._is_legacy else self._showing():
            plain(model, force)
        inner = model.train_function

        @functools.wraps(inner, updated=())  # that of tf_keras is no plain function
        def train_function(*arguments: Any, **named: Any) -> Any:
            return self._run(inner, arguments, named)

        model.train_function = train_function
        return train_function

    def _run(self, inner: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        model = self._model
        observers = _observers_here(model)
        self._open(any(each.wants_batch for each in observers))
        for each in observers:
            each.begins(model, self._calls)
        self._calls += 1
        if self._is_open and not self._on_tensorflow and arguments:
            self._show(arguments[0][0])
        tell(lambda watch: watch.batch_is_asked())
        with self._showing() if self._is_legacy else nullcontext():
            logs = inner(*arguments, **named)
        for each in observers:
            each.ends(model, steps_of_call(model))
        return logs

    # -- the batch: see [Note: the batch] ------------------------------------------------------------

    def _make_gate(self) -> None:
        from ...tensorflow.installed import tf

        with tf.init_scope(), tf.device("CPU:0"):  # elsewhere each step would wait for the device
            self._gate = tf.Variable(False, trainable=False, name="farandole_shows_batch")

    @contextmanager
    def _showing(self) -> Iterator[None]:
        """Let the model's step show its batch, and mark when it was there. See [Note: tf_keras]."""
        model = self._model
        if not self._on_tensorflow or model.jit_compile:  # neither can be inside an XLA program
            yield
            return
        from ...tensorflow.installed import tf

        self._is_single = steps_of_call(model) == 1
        seen = tf.autograph.experimental.do_not_convert(self._seen)  # tf_keras converts what it calls
        # Not by the model's own `__setattr__`, which looks for layers in what it is given.
        own, step = model.__dict__.get("train_step"), model.train_step

        def train_step(data: Any) -> Any:
            return step(seen(data))

        model.__dict__["train_step"] = train_step
        try:
            yield
        finally:
            del model.__dict__["train_step"]
            if own is not None:
                model.__dict__["train_step"] = own

    def _open(self, wanted: bool) -> None:
        if wanted != self._is_open:
            self._is_open = wanted
            if self._gate is not None:
                self._gate.assign(wanted)

    def _seen(self, data: Any) -> Any:
        """Return the batch, after it was marked and shown."""
        from ...tensorflow.gradients import mark_batch
        from ...tensorflow.installed import tf

        if self._marks:
            data = mark_batch(data, is_only=self._is_single)
        if self._gate is None:
            return data
        if tf.executing_eagerly():
            if self._is_open:
                self._show(data)
            return data
        leaves = leaves_of(data)
        plain = [each for each in leaves if isinstance(each, tf.Tensor)]
        if len(plain) == len(leaves) and plain:  # not ragged ones, nor sparse ones

            def note(*arrays: Array) -> np.bool_:
                self._note(data, [np.array(each) for each in arrays])
                return np.bool_(True)

            tf.cond(
                self._gate,
                lambda: tf.ensure_shape(tf.numpy_function(note, plain, tf.bool), []),
                lambda: tf.constant(False),
            )
        return data

    def _show(self, data: Any) -> None:
        arrays = arrays_of(data)
        if arrays is not None:
            self._note(data, arrays)

    def _note(self, data: Any, arrays: list[Array]) -> None:
        weighs = isinstance(data, tuple) and len(data) > 2 and data[2] is not None
        for each in _observers_here(self._model):
            if each.wants_batch:
                each.batch(arrays, weighs=weighs)


def _is_recorded() -> bool:
    """Return whether the steps of this process are recorded."""
    found: list[bool] = []
    tell(lambda watch: found.append(watch.is_recorded))
    return any(found)


# A training by `fit` under ``farandole verify``: its batches and steps.


class FitVerification:
    """A `fits.FitObserver` that tells the verification of its world."""

    wants_batch = True

    def __init__(self, verification: ArrayVerification) -> None:
        self._verification = verification
        self._seeds = OwnSeeds(verification.here.rank)
        verification.is_fit = True

    def begins(self, model: Any, calls: int) -> None:
        """Give the model seeds of this rank, as without ``farandole verify``."""
        if calls < 2 and is_distributed(model):
            self._seeds.give(model)

    def batch(self, arrays: Sequence[Array], *, weighs: bool) -> None:
        """Keep what tells it from others."""
        self._verification.batch(arrays, weighs=weighs)

    def ends(self, model: Any, steps: int) -> None:
        """Count it; after the last step that is wanted the script ends."""
        self._verification.step_ends(batches_per_step(model))


# What ranks of a guide's script do together and should not: write one file, and each read a whole folder.
#
# Guides give every rank the same callbacks. Ranks that save to one HDF5 file then meet at its lock, and the one
# that comes second ends with `BlockingIOError`. So a `ModelCheckpoint` whose path rank 0 has too writes on rank 0
# alone.
#
# A checkpoint says its path in the store when a training begins. Ranks look there when they save: by then each has
# been through an exchange of gradients with rank 0, whose training had begun.


_FILES_MARK = "_farandole_is_shared"
_OLD_ENDINGS = (".h5", ".hdf5")


def guard_files(keras: Any, *, is_3: bool) -> None:
    """Guard the checkpoints and the data of all trainings of a Keras, 3 or tf_keras. May be called again."""
    kind = keras.callbacks.ModelCheckpoint
    if not getattr(kind._save_model, _FILES_MARK, False):
        _guard_checkpoints(kind, is_3)
        _guard_generators(keras.Model)


def _guard_checkpoints(kind: Any, is_3: bool) -> None:
    begin, save, make = kind.set_model, kind._save_model, kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807 - put into a class below
        try:
            make(self, *arguments, **named)
        except ValueError as problem:
            path = str(named.get("filepath", arguments[0] if arguments else ""))
            if not is_3 or not path.endswith(_OLD_ENDINGS):
                raise
            raise ValueError(f"{problem}\n{_legacy_hint(path)}") from None

    @functools.wraps(begin)
    def set_model(self: Any, model: Any) -> None:
        begin(self, model)
        store, rank = _store_of(model)
        if store is not None and rank == 0:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                store.set(_key_of(self), "1")

    @functools.wraps(save)
    def _save_model(self: Any, *arguments: Any, **named: Any) -> Any:
        return None if _is_rank_0s(self) else save(self, *arguments, **named)

    setattr(_save_model, _FILES_MARK, True)
    kind.__init__, kind.set_model, kind._save_model = __init__, set_model, _save_model


def _is_rank_0s(callback: Any) -> bool:
    """Return whether this rank leaves a file to rank 0; the first rank that does says so."""
    store, rank = _store_of(callback.model)
    if store is None or rank == 0:
        return False
    key = _key_of(callback)
    with suppress(RuntimeError):
        if not store.check([key]):
            return False
        if store.add(f"{key}/said", 1) == 1:
            write_notice(
                f"rank 0 alone writes {os.fspath(callback.filepath)}, which every rank's ModelCheckpoint was to "
                "write; give it to rank 0 only (if hvd.rank() == 0: callbacks.append(...)), or each rank its own"
            )
        return True
    return False


def _store_of(model: Any) -> tuple[dist.Store | None, int]:
    """Return the store of the ranks that train a model together, if there are several, and this rank."""
    running = find_running()
    if running is None or running.world.size == 1 or not is_distributed(model):
        return None, 0
    return running.world.store, running.world.rank


def _key_of(callback: Any) -> str:
    path = str(Path(callback.filepath).absolute())
    return f"keras/files/{hashlib.sha256(path.encode()).hexdigest()[:16]}"


def _legacy_hint(path: str) -> str:
    ending = Path(path).suffix
    root = path.removesuffix(ending)
    return (
        f'farandole: a name for Keras 3 is "{root}.weights.h5" with save_weights_only=True, and "{root}.keras" '
        f"without; to run the script as it is, with names such as *{ending}: pip install --no-deps tf_keras, and "
        "start it with TF_USE_LEGACY_KERAS=1"
    )


def _guard_generators(kind: Any) -> None:
    fit = kind.fit

    @functools.wraps(fit)
    def with_a_word(self: Any, *arguments: Any, **named: Any) -> Any:
        data = named.get("x", arguments[0] if arguments else None)
        # What flow_from_directory returns, in either Keras; one whose samples are shared out is another class.
        if hasattr(data, "directory") and hasattr(data, "class_indices"):
            _say_that_it_is_read_whole(self, data)
        return fit(self, *arguments, **named)

    kind.fit = with_a_word


def _say_that_it_is_read_whole(model: Any, data: Any) -> None:
    store, rank = _store_of(model)
    if store is None or rank:
        return
    with suppress(RuntimeError):
        if store.add(f"keras/files/{data.directory}/said", 1) > 1:
            return
    remedy = "give flow_from_directory a seed, and then train_generator = farandole.keras.shard(train_generator)"
    if is_legacy(type(model)):
        remedy = "use a tf.data.Dataset, and farandole.keras.shard(dataset)"
    write_notice(
        f"warning: every rank reads all {len(data.filenames)} images of {data.directory}, in an order of its own: "
        f"samples of an epoch are trained on several times or not at all; divide them: {remedy}"
    )


# Warnings about mistakes in a `fit` on several ranks: the same samples on ranks, and ranks that drift apart.
#
# What torch's trainings get by `train.equal_models` and `same_data`; texts and times are the same.


_MOST_ARRAYS, _MOST_BATCH_ELEMENTS = 8, 65536
_MOST_WEIGHTS, _MOST_ELEMENTS = 256, 1024
_SHARD = "dataset = farandole.keras.shard(dataset)"
_METRICS = "put hvd.callbacks.MetricAverageCallback() before the callback that decides"


class Guards:
    """A `fits.FitObserver` of one world of several ranks."""

    def __init__(self, here: World) -> None:
        self._seeds = OwnSeeds(here.rank)
        self._batches = BatchDigests(here, "first Keras batch", _SHARD)
        self._models = ModelDigests(here, "equal Keras models", _METRICS)
        self._digest: str | None = None
        """The hash of the first batch; empty: it is too small to tell ranks apart."""
        self._calls = 0
        self._steps = 0

    @property
    def wants_batch(self) -> bool:
        """The first one alone."""
        return self._digest is None and self._calls == 0

    def begins(self, model: Any, calls: int) -> None:
        """Give the model seeds of this rank; in the second step too, as layers may be made in the first."""
        if calls < 2:
            self._seeds.give(model)

    def batch(self, arrays: Sequence[Array], *, weighs: bool) -> None:
        """Keep a hash of the first one."""
        if self._digest is None:
            is_telling = sum(each.size for each in arrays) > 1
            self._digest = digest_of(arrays[:_MOST_ARRAYS], _MOST_BATCH_ELEMENTS) if is_telling else ""

    def ends(self, model: Any, steps: int) -> None:
        """Leave the hash after the first call, compare after the second: all ranks have left theirs by then."""
        self._calls += 1
        if self._calls == 1 and self._digest:
            self._batches.leave(self._digest)
        elif self._calls == 2:
            self._batches.compare()
        self._steps += steps
        self._models.after_step(self._steps, lambda: (_digest(model), learning_rates(model)))


def _digest(model: Any) -> str:
    digest = hashlib.sha256()
    for variable in islice(shared_weights(model), _MOST_WEIGHTS):
        digest.update(beginning_of(variable, _MOST_ELEMENTS).tobytes())
    return digest.hexdigest()


# Seeds of each rank: a script that seeds all ranks alike gets equal weights, and other dropout masks on each.
#
# [Note: masks] After ``keras.utils.set_random_seed(1)`` all ranks would draw the same masks, so the samples of
# ranks would share their noise, and in one process on the joined batch they do not. Layers draw from generators of
# seeds, each a variable with a seed and a counter. Before the first step the seed is replaced by a hash of it and
# of the rank; rank 0 keeps its own, as one process has it. Nothing is exchanged for it, and the same script draws
# the same again. On torch, dropout draws from torch's own generators: they are seeded in the same way.


_SEED_MARK = "_farandole_rank_seed"


class OwnSeeds:
    """Lets the layers of models draw other random numbers than those of other ranks. See [Note: masks]."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_seeded_torch = False

    def give(self, model: Any) -> None:
        """Give a model seeds of this rank, where it has others."""
        if self._rank == 0:
            return
        if on_torch() and not self._has_seeded_torch:
            self._has_seeded_torch = True
            torch.manual_seed(rank_seed(torch.initial_seed(), self._rank))
        _give_states(model, self._rank)


def _give_states(model: Any, rank: int) -> None:
    for variable in seed_states(model):
        if getattr(variable, _SEED_MARK, False):
            continue
        setattr(variable, _SEED_MARK, True)
        state = to_numpy(variable)
        if state is not None and state.shape == (2,):
            own = np.array(state)
            own[0] = rank_seed(int(state[0]), rank) % 2**31  # torch keeps it in 32 bits with a sign
            variable.assign(own)


# Models, variables and optimizers of both Keras, as the watchers of `fit` need them.


SEED_STATE = "seed_generator_state"
"""How Keras names the variable in which a generator of seeds keeps its seed and its counter."""


def backend_of(model: Any) -> str:
    """Return what a model computes with: "tensorflow", "torch", ..."""
    if is_legacy(type(model)):
        return "tensorflow"
    import keras

    return str(keras.backend.backend())


def steps_of_call(model: Any) -> int:
    """Return how many steps one call of the train function makes."""
    return int(as_numpy(model.steps_per_execution)) if is_legacy(type(model)) else int(model.steps_per_execution)


def is_distributed(model: Any) -> bool:
    """Return whether the gradients of a model's optimizer meet those of all ranks."""
    settings = getattr(getattr(model, "optimizer", None), "_farandole_settings", None)
    running = find_running()
    return settings is not None and running is not None and settings.process_set.size() == running.world.size


def to_numpy(value: Any) -> Array | None:
    """Return a tensor or variable of the backend as an array; None for what is none, or sparse."""
    if is_tensorflows(value):
        return np.array(value.numpy())
    import keras

    try:
        return np.array(keras.ops.convert_to_numpy(value))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None


def arrays_of(batch: Any) -> list[Array] | None:
    """Return what lies in a batch as arrays; None where something in it is none."""
    found = [to_numpy(each) for each in leaves_of(batch)]
    arrays = [each for each in found if each is not None]
    return arrays if len(arrays) == len(found) else None


def beginning_of(variable: Any, most: int) -> Array:
    """Return the first elements of a variable, without a copy of the others."""
    if is_tensorflows(variable):
        from ...tensorflow.installed import tf

        return np.asarray(tf.reshape(variable, [-1])[:most].numpy())
    import keras

    return np.asarray(keras.ops.convert_to_numpy(keras.ops.ravel(variable)[:most]))


def shared_weights(model: Any) -> list[Any]:
    """Return the weights that are trained alike on all ranks."""
    found = (getattr(model.optimizer, name, None) for name in ("_farandole_gradients", "_farandole_exchange"))
    gradients = next((each for each in found if each is not None), None)
    local: set[int] = getattr(gradients, "local", set())
    return [each for each in model.trainable_variables if key_of(each) not in local]


def seed_states(model: Any) -> list[Any]:
    """Return the variables of the generators of seeds that a model draws from, Keras's own one included.

    None for tf_keras: it keeps seeds in other places.
    """
    if is_legacy(type(model)):
        return []
    found = [each for each in model.variables if getattr(each, "name", "") == SEED_STATE]
    shared = _global_generator()
    return found if shared is None else [*found, shared.state]


def batches_per_step(model: Any) -> int:
    """Return how many batches one step of the optimizer has."""
    optimizer = getattr(model, "optimizer", None)
    settings = getattr(optimizer, "_farandole_settings", None)
    accumulated = (
        getattr(each, "gradient_accumulation_steps", None) or 1
        for each in (optimizer, getattr(optimizer, "inner_optimizer", None))
    )
    return max(getattr(settings, "passes", 1), *accumulated)


def is_tensorflows(value: Any) -> bool:
    """Return whether a tensor or variable is TensorFlow's own, and not one of Keras 3."""
    return type(value).__module__.partition(".")[0] == "tensorflow"


def _global_generator() -> Any:
    """Return the generator that layers without a seed of their own draw from; None before it is made."""
    try:
        from keras.src.backend.common.global_state import get_global_attribute
        from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    except ImportError:  # a private place of Keras: it may move
        return None
    return get_global_attribute(GLOBAL_SEED_GENERATOR)


def on_torch() -> bool:
    """Return whether Keras runs on torch."""
    import keras

    return bool(keras.backend.backend() == "torch")


def learning_rates(model: Any) -> list[float]:
    """Return the learning rate, as the list that the comparison of models takes."""
    try:
        return [float(to_numpy(model.optimizer.learning_rate))]  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):  # an optimizer without one
        return []

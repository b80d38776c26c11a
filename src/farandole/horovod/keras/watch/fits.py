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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np

from ....comm.world.world import World
from ...array_verification import Array, find_verification, leaves_of
from ...common.running import find_running
from ...exchange.step_watch import tell
from ..variables import is_legacy
from .backends import arrays_of, backend_of, is_distributed, steps_of_call
from .shared_files import guard_files

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
    from .guards import Guards
    from .verified import FitVerification

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

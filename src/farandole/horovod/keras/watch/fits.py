"""Where a training of Keras 3 is watched: around the function that `fit` and `train_on_batch` call for each step.

`keras.Model.make_train_function` makes that function, on every backend; ours calls it and puts a function around
what it made. A callback would see neither the batch nor `train_on_batch`, and a script would have to add it.

[Note: the batch] On TensorFlow a batch is seen inside a graph alone. So while `make_train_function` runs, the
model's `train_step` is one that shows the batch first, by a Python function in a branch that is taken only while
an observer wants the batch. On torch the batch is an argument.

Models are watched on TensorFlow and on torch. Where nothing is to be seen (one rank, no `hvd.init`, an optimizer
that is not distributed) Keras does what it does without us.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ....comm.world.world import World
from ...common.running import find_running
from ...verify.arrays import Array, leaves_of, replaced
from ...verify.verification import find_verification
from .backends import is_distributed, to_numpy

_BACKENDS = ("tensorflow", "torch")
_MARK = "_farandole_is_watched"


class FitObserver(Protocol):
    """Who looks at the trainings of one world."""

    @property
    def wants_batch(self) -> bool:
        """Whether the next batch is to be shown."""

    def begins(self, model: Any, calls: int) -> None:
        """A step is about to be made; or several, with ``steps_per_execution``.

        `calls`: of the same train function before.
        """

    def batch(self, model: Any, nest: Any, arrays: Sequence[Array]) -> None:
        """This is its batch: the nest, and the arrays in it. May be called by a thread of TensorFlow's."""

    def ends(self, model: Any, steps: int, logs: Any) -> None:
        """The step is done; so many, with ``steps_per_execution``."""


def watch_fits() -> None:
    """Watch the trainings of all models of Keras 3 from now on. May be called again."""
    import keras

    plain = keras.Model.make_train_function
    if getattr(plain, _MARK, False) or keras.__version__.split(".")[0] != "3":
        return

    @functools.wraps(plain)
    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return plain(self, force)
        if keras.backend.backend() not in _BACKENDS:
            _note_unseen(f"Keras runs on {keras.backend.backend()}: verify sees steps on TensorFlow and torch")
            return plain(self, force)
        return _Watched(self).make(plain, force)

    setattr(make_train_function, _MARK, True)
    keras.Model.make_train_function = make_train_function


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


def _note_unseen(why: str) -> None:
    here = _here()
    verification = None if here is None else find_verification(here)
    if verification is not None:
        verification.not_checked = why


def _here() -> World | None:
    running = find_running()
    return None if running is None or running.world.in_forked_child else running.world


class _Watched:
    """The train function of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._gate: Any = None
        """A variable of TensorFlow's: whether the graph shows its batch."""
        self._is_open = False
        self._calls = 0

    def make(self, plain: Any, force: bool) -> Any:
        model, here = self._model, _here()
        if here is None or not _observers(here, model):
            return plain(model, force)
        if find_verification(here) is not None:
            model.jit_compile = False  # a Python function cannot be inside an XLA program
            model.steps_per_execution = 1  # each step is compared
        with self._showing():
            result = plain(model, force)
        inner = model.train_function

        @functools.wraps(inner)
        def train_function(*arguments: Any, **named: Any) -> Any:
            return self._run(inner, arguments, named)

        model.train_function = train_function
        return result

    def _run(self, inner: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        here, model = _here(), self._model
        observers = [] if here is None else _observers(here, model)
        self._open(any(each.wants_batch for each in observers))
        for each in observers:
            each.begins(model, self._calls)
        self._calls += 1
        if self._is_open and not _on_tensorflow() and arguments:
            self._show(arguments[0][0])
        logs = inner(*arguments, **named)
        for each in observers:
            each.ends(model, model.steps_per_execution, logs)
        return logs

    # -- the batch: see [Note: the batch] ------------------------------------------------------------

    @contextmanager
    def _showing(self) -> Iterator[None]:
        """Let the model's train function be made of a step that shows its batch."""
        model = self._model
        if not _on_tensorflow() or model.jit_compile:  # no Python function can be inside an XLA program
            yield
            return
        from ...tensorflow.installed import tf

        with tf.init_scope(), tf.device("CPU:0"):  # elsewhere each step would wait for the device
            self._gate = tf.Variable(False, trainable=False, name="farandole_shows_batch")
        # Not by the model's own `__setattr__`, which looks for layers in what it is given.
        own, step = model.__dict__.get("train_step"), model.train_step

        def train_step(data: Any) -> Any:
            return self._shown(step, data)

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

    def _shown(self, step: Any, data: Any) -> Any:
        """Show the batch, and make the step."""
        from ...tensorflow.installed import tf

        if tf.executing_eagerly():
            if self._is_open:
                self._show(data)
            return step(data)
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
        return step(data)

    def _show(self, data: Any) -> None:
        arrays = [to_numpy(each) for each in leaves_of(data)]
        if all(each is not None for each in arrays):
            self._note(data, [each for each in arrays if each is not None])

    def _note(self, data: Any, arrays: list[Array]) -> None:
        here = _here()
        nest = replaced(data, iter(range(len(arrays))))
        for each in [] if here is None else _observers(here, self._model):
            if each.wants_batch:
                each.batch(self._model, nest, arrays)


def _on_tensorflow() -> bool:
    import keras

    return bool(keras.backend.backend() == "tensorflow")

"""The backend of Keras 3, and how gradients meet on it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from ....core.environ.env import set_variables
from ....core.vocabulary.text import install_command
from ...exchange.settings import GradientSettings
from ...exchange.step_watch import tell

_TRAIN = ("tensorflow", "torch")
_NOT_BUILT = (
    "Keras on {backend} is not supported: set KERAS_BACKEND to tensorflow or torch before keras is imported"
)
_INSTALL = "pip install tensorflow or tensorflow-cpu, or set KERAS_BACKEND=torch"


class KerasGradients(Protocol):
    """How the gradients of one optimizer meet."""

    local: set[int]
    """Variables, by `key_of`, whose gradients stay on this rank."""

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks."""


def backend_name() -> str:
    """Return the backend of Keras 3: "tensorflow", "torch", ..."""
    import keras

    found: str = keras.backend.backend()
    return found


def make_gradients(settings: GradientSettings, name: str) -> KerasGradients:
    """Return how the gradients of one optimizer meet; NotImplementedError for backends that are not built."""
    if backend_name() == "tensorflow":
        from ...tensorflow.gradients import FlatExchange

        return FlatExchange(settings, name)
    if backend_name() == "torch":
        from .torch_gradients import TorchGradients

        return TorchGradients(settings, name)
    raise NotImplementedError(f"farandole.horovod: {_NOT_BUILT.format(backend=backend_name())}")


def mark_loss(loss: Any) -> Any:
    """Return the loss of a batch; for the records, mark when it is known."""
    if backend_name() == "tensorflow":
        from ...tensorflow.gradients import mark_loss as marked

        return marked(loss)
    if backend_name() == "torch" and not is_compiling():
        tell(lambda watch: watch.loss_is_known(had_batch=True))
    return loss


def mark_step() -> None:
    """Note for the records that the optimizer has stepped, where Python sees it."""
    if backend_name() == "torch" and not is_compiling():
        tell(lambda watch: watch.optimizer_is_done())


def is_compiling() -> bool:
    """Return whether torch makes a graph of what runs."""
    import torch

    return torch.compiler.is_compiling()


def refuse_other_backends() -> None:
    """Raise NotImplementedError for backends on which nothing can be exchanged."""
    if backend_name() not in _TRAIN:
        raise NotImplementedError(f"farandole.horovod: {_NOT_BUILT.format(backend=backend_name())}")


def import_keras(name: str, extra: str) -> Any:
    """Return a module of Keras; raise ImportError that says what to install."""
    try:
        found = importlib.import_module(name)
    except (ModuleNotFoundError, ValueError) as problem:
        backend = set_variables(["KERAS_BACKEND"]).get("KERAS_BACKEND", _TRAIN[0])
        if backend not in _TRAIN:  # what is missing then is not what is wrong: JAX and NumPy want packages
            raise ImportError(f"farandole.horovod.{extra}: {_NOT_BUILT.format(backend=backend)}") from None
        if not isinstance(problem, ModuleNotFoundError):
            raise
        missing = problem
        if missing.name == "tensorflow":
            raise ImportError(
                f"farandole.horovod.{extra}: Keras runs on tensorflow, which is not installed: {_INSTALL}"
            ) from None
        if missing.name != name.partition(".")[0]:
            raise
        raise ImportError(
            f"farandole.horovod.{extra}: {name} is not installed; {install_command(extra)}"
        ) from None
    if name.partition(".")[0] == "keras" and (backend := backend_name()) not in _TRAIN:
        raise ImportError(f"farandole.horovod.{extra}: {_NOT_BUILT.format(backend=backend)}")
    return found

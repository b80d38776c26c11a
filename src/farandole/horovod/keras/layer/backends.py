"""The backend of Keras 3, and how gradients meet on it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ....core.env import set_variables
from ....core.vocabulary.text import install_command
from ...common.exceptions import HorovodMismatchError
from ...common.operations import begin, set_number, wait
from ...exchange.layouts import FlatBucket, Place, layouts
from ...exchange.settings import GradientSettings
from ...exchange.step_watch import Round, RoundPart, tell
from ...named_gradients import NamedGradients, Sent
from ...named_ops.operations import Request, Ticket

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


# How the gradients of a Keras optimizer on torch meet: flat buckets, exchanged in place by the engine.


class TorchGradients(NamedGradients):
    """How the gradients of one optimizer meet."""

    travel_so = "those of Keras travel so"
    front_end = "keras on torch"

    def _is_alone(self) -> bool:
        return self.settings.process_set.size() in (None, 1)

    def _place(self, label: str, gradient: torch.Tensor | None) -> Place:
        return (
            Place(label, (), "") if gradient is None else Place(label, tuple(gradient.shape), str(gradient.dtype))
        )

    def _begin(self, layout: str, there: Sequence[int], *, has_none: bool) -> None:
        """Compare the layout: each time by a rank without gradients, as others may wait."""
        if there:
            number = set_number(self.settings.process_set, "Allreduce")
            layouts.compare_now(f"allreduce.{self.name}.0", layout, number, again=has_none)

    def _compress(self, gradient: torch.Tensor, variable: Any) -> Sent:
        sent, context = self.settings.compression.compress(gradient.detach().contiguous())
        return Sent(sent, context, tuple(sent.shape), sent.dtype)

    def _exchange(
        self, buckets: Sequence[FlatBucket], tensors: Sequence[Any], layout: str, names: Sequence[tuple[str, ...]]
    ) -> list[list[Any]]:
        flats = [_flat(bucket, own) for bucket, own in zip(buckets, tensors, strict=True)]
        round_ = Round(self.name, one_by_one=False, front_end=self.front_end)
        tickets: list[Ticket] = []
        going: list[RoundPart] = []
        try:
            for number, (bucket, flat) in enumerate(zip(buckets, flats, strict=True)):
                going.append(round_.add(bucket.nbytes, bucket.codec, names[number]))
                going[-1].submitted()
                tickets += begin([self._request(number, bucket, flat)])
            round_.all_added()
            wait(tickets)
        except HorovodMismatchError as problem:
            raise layouts.explained(problem, f"allreduce.{self.name}.0", layout) from problem
        for part, ticket in zip(going, tickets, strict=True):
            part.arrived(ticket)
        return [_shares(bucket, flat) for bucket, flat in zip(buckets, flats, strict=True)]

    def _request(self, number: int, bucket: FlatBucket, flat: torch.Tensor) -> Request:
        return Request(
            f"allreduce.{self.name}.{number}",
            "allreduce",
            flat,
            in_place=True,
            process_set=set_number(self.settings.process_set, "Allreduce"),
            codec=bucket.codec,
            chosen_with=self.name,
            **self._operation(),
        )

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        size = self.settings.process_set.size()
        assert size is not None, "not alone"
        return gradient / size

    def _read(self, variable: Any) -> Any:
        tensor = getattr(variable, "value", variable).detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _flat(bucket: FlatBucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a buffer of its own with the gradients of a bucket."""
    if bucket.is_whole:
        return tensors[0].clone()
    flat = tensors[0].new_zeros(sum(bucket.sizes))
    for part, share, tensor in zip(bucket.parts, flat.split(bucket.sizes), tensors, strict=True):
        share[: part.elements].copy_(tensor.reshape(-1))
    return flat


def _shares(bucket: FlatBucket, flat: torch.Tensor) -> list[torch.Tensor]:
    if bucket.is_whole:
        return [flat]
    shares = zip(bucket.parts, flat.split(bucket.sizes), strict=True)
    return [share[: part.elements].view(part.shape) for part, share in shares]

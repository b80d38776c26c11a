"""What one process would compute in a step: the step of a rank is made again, on the batches of all ranks joined.

[Note: the replay] Before the step all variables of the model and its optimizer are kept. After it, they are put
back, the model's own `train_step` is called outside graphs with the samples of all ranks, and the gradients are
noted where they would be exchanged. Then all variables are again what they were after the real step. So losses,
regularisation, loss scales and a `train_step` of the script's own are all in it. Every rank does so, as the model
may talk to the other ranks (`SyncBatchNormalization`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...common.objects import allgather_object
from ...verify.arrays import Array, digest_of, leaves_of, replaced
from ...verify.exchanges import SeenExchange
from ...verify.verification import ArrayVerification
from .backends import SEED_STATE, as_tensor, backend_of, to_numpy, torch_random_state, variables_of

_MOST_BYTES = 256 * 2**20


@dataclass
class Snapshot:
    """All variables of a model and its optimizer, and their values."""

    variables: list[Any]
    values: list[Array]
    random_state: bytes

    @classmethod
    def take(cls, model: Any) -> Snapshot | None:
        """Return the values as they are; None before the model has variables."""
        if not model.built:
            return None
        variables = list({id(each): each for each in variables_of(model)}.values())
        values = [to_numpy(each) for each in variables]
        if any(each is None for each in values):
            return None
        return cls(variables, [each for each in values if each is not None], torch_random_state())

    def put_back(self) -> None:
        """Give the variables these values."""
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(value)

    def weights_digest(self) -> str:
        """Return a hash of what is trained."""
        pairs = zip(self.variables, self.values, strict=True)
        return digest_of([value for variable, value in pairs if getattr(variable, "trainable", False)])

    def drew_random_numbers(self) -> bool:
        """Return whether a generator of seeds, or of torch, has moved on since."""
        if self.random_state != torch_random_state():
            return True
        for variable, value in zip(self.variables, self.values, strict=True):
            now = to_numpy(variable) if getattr(variable, "name", "") == SEED_STATE else value
            if now is None or not np.array_equal(now, value):
                return True
        return False


def shape_of_batch(arrays: Sequence[Array]) -> tuple[str, int]:
    """Return what batches must have in common to be joined, and the number of samples."""
    rows = next((each.shape[0] for each in arrays if each.ndim), 0)
    rest = [(str(each.dtype), each.shape[1:] if each.ndim else None, each.ndim and each.shape[0] == rows)
            for each in arrays]  # fmt: skip
    return repr(rest), rows


def too_large(arrays: Sequence[Array], size: int) -> bool:
    """Return whether the joined batch would take too much memory."""
    return sum(each.nbytes for each in arrays) * size > _MOST_BYTES


def join(arrays: Sequence[Array]) -> list[Array]:
    """Return the samples of all ranks. To be called by all ranks."""
    everybody = allgather_object(list(arrays), name="farandole.verify.batch")
    return [np.concatenate(parts) if parts[0].ndim else parts[0] for parts in zip(*everybody, strict=True)]


def replay(
    verification: ArrayVerification, model: Any, before: Snapshot, nest: Any, arrays: Sequence[Array]
) -> list[SeenExchange]:
    """Return the gradients of one process. See [Note: the replay]."""
    after = Snapshot.take(model)
    assert after is not None, "there was one before"
    data = replaced(nest, iter([as_tensor(model, each) for each in arrays]))
    assert len(leaves_of(nest)) == len(arrays), "one array for each leaf"
    verification.replayed = []
    before.put_back()
    try:
        if backend_of(model) == "jax":
            from .jax_steps import replay_step

            replay_step(model, data)
        else:
            with _outside_graphs(model):
                model.train_step(data)
        return verification.replayed
    finally:
        verification.replayed = None
        after.put_back()


@contextmanager
def _outside_graphs(model: Any) -> Iterator[None]:
    """Let functions that the script has made graphs of run as they are: their graphs would exchange."""
    if backend_of(model) != "tensorflow":
        yield
        return
    from ...tensorflow.installed import tf

    was = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(was)

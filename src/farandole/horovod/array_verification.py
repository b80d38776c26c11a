"""One training with TensorFlow or Keras under ``farandole verify``: equal weights, and different samples.

Exchanges of gradients tell whose weights there are, and the loop of `fit` its batches and when a step ends. In a
loop of the script's own the samples are not known. With one process only gradients of torch are compared.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.vocabulary.text import name_ranks
from ..train.verify.verification_run import VerificationRun
from ..train.verify.verify import Check, check_batches, check_equal, check_sizes
from .exchange.names import as_torch

Array = np.ndarray[Any, Any]
Variables = Callable[[], Sequence[tuple[str, Array]]]

_SHARD = "dataset = farandole.keras.shard(dataset)"
_BROADCAST = (
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit, or hvd.broadcast_variables before the first step; "
    "change weights on all ranks alike"
)
_WRAP = "optimizer = hvd.DistributedOptimizer(optimizer), or tape = hvd.DistributedGradientTape(tape)"
_OWN_LOOP = "the loop is not model.fit"
_OF_TORCH = "of trainings with TensorFlow and Keras, weights and samples are compared"


class ArrayVerification:
    """A `FrontEnd` of `VerificationRun`, kept by the session of a world."""

    def __init__(self, here: World, run: VerificationRun) -> None:
        self.here, self.run = here, run
        self.is_fit = False
        """Whether `fit` tells of batches and steps."""
        self.steps = 0
        """That are done; in a loop of the script's own, exchanges of the first optimizer that were begun."""
        self._leader = ""
        self._not_checked = ""
        """Why nothing can be said of this training; empty: something can."""
        self._variables: dict[tuple[str, int], Variables] = {}
        self._batches: list[str] = []
        self._samples: list[int] = []
        self._weighs = False
        run.watch_also(self)

    def begins(self, name: str, first: object, variables: Variables, *, is_eager: bool, ranks: int) -> None:
        """Gradients are about to be exchanged, outside graphs; or the exchange is put into a graph.

        In a loop of the script's own, outside graphs, the script ends here after the wanted number of steps.

        Args:
            name: of the optimizer or tape.
            first: the first of its variables.
            variables: returns those whose gradients they are, with their labels.
            is_eager: outside graphs.
            ranks: how many take part.
        """
        if ranks < self.here.size:
            self._not_checked = (
                f"gradients are exchanged within a process set of {ranks} ranks: verify compares all"
            )
        self._leader = self._leader or name
        self._variables.setdefault((name, id(first)), variables)
        if is_eager and name == self._leader and not self.is_fit:
            if self.steps >= self.run.steps and threading.current_thread() is threading.main_thread():
                self.run.finish()
            self.steps += 1

    def batch(self, arrays: Sequence[Array], *, weighs: bool) -> None:
        """This rank trains on these arrays. `weighs`: whether there are sample weights among them."""
        self._batches.append(digest_of(arrays))
        self._samples.append(next((each.shape[0] for each in arrays if each.ndim), 0))
        self._weighs |= weighs

    def step_ends(self, batches_per_step: int) -> None:
        """A batch of `fit` is done; the script ends after the last one that is wanted."""
        self.steps += 1
        if self.steps >= self.run.steps * batches_per_step:
            self.run.finish()

    def checks(self) -> list[Check]:
        """Return the answers."""
        here = self.here
        told = all_gather_json(here, "verify/loops", [self.is_fit, self._not_checked, bool(self._variables)])
        reasons = [why for _, why, _ in told if why]
        if reasons:
            return [_not_checked("training", reasons[0])]
        if len({is_fit for is_fit, *_ in told}) > 1:
            return [Check("training", False, "some ranks train by model.fit, others do not", "train alike")]
        checks = []
        if all(is_exchanged for *_, is_exchanged in told):
            checks.append(self._weights())
        elif here.size > 1:
            alone = [rank for rank, (*_, is_exchanged) in enumerate(told) if not is_exchanged]
            whose = "" if len(alone) == here.size else f" by {name_ranks(alone)}"
            answer = f"no gradients were exchanged{whose}: each rank trains a model of its own"
            checks.append(Check("gradients", False, answer, _WRAP))
        if self.is_fit:
            numbers = range(1, len(self._batches) + 1)
            if not self._weighs:
                checks += check_sizes(here, self._samples, numbers, _SHARD)
            checks.append(check_batches(here, self._batches, numbers, _SHARD))
        else:
            checks.append(_not_checked("batches", _OWN_LOOP))
        return [*checks, _not_checked("gradients of one process", _OF_TORCH)]

    def _weights(self) -> Check:
        found: dict[str, torch.Tensor] = {}
        for read in self._variables.values():
            for label, array in read():
                name = label if label not in found else f"{label} ({len(found)})"
                found[name] = as_torch(array, "farandole verify")
        return check_equal(self.here, "weights", found, _BROADCAST)


def find_verification(here: World) -> ArrayVerification | None:
    """Return that of a world, made at the first call; None where ``farandole verify`` did not start the job."""
    run = here.session.kept(VerificationRun)
    if run is None:
        return None
    return here.session.keep(ArrayVerification, lambda: ArrayVerification(here, run))


def leaves_of(nest: Any) -> list[Any]:
    """Return what lies in a nest of lists, tuples and dicts, in a fixed order. None is no leaf."""
    if nest is None:
        return []
    if isinstance(nest, Mapping):
        return [leaf for key in sorted(nest, key=str) for leaf in leaves_of(nest[key])]
    if isinstance(nest, (list, tuple)):
        return [leaf for each in nest for leaf in leaves_of(each)]
    return [nest]


def digest_of(arrays: Iterable[Array], most: int | None = None) -> str:
    """Return a hash of the shapes, types and values of arrays; of each at most the first `most` elements."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}".encode())
        flat = np.ascontiguousarray(array.reshape(-1)[:most])
        digest.update(repr(flat.tolist()).encode() if array.dtype == object else flat.tobytes())
    return digest.hexdigest()[:32]


def _not_checked(name: str, why: str) -> Check:
    """Return the answer to a question that has none. It counts as a thing to know."""
    return Check(name, None, why, word="not checked")

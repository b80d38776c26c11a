"""Warnings about mistakes in a `fit` on several ranks: the same samples on ranks, and ranks that drift apart.

What torch's trainings get by `train.guards`; texts and times are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ....comm.world.world import World
from ....train.guards.equal_models import ModelDigests
from ....train.guards.same_data import BatchDigests
from ...array_verification import Array, digest_of
from .backends import beginning_of, learning_rates, shared_weights
from .seeds import OwnSeeds

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

"""Warnings about mistakes in a `fit` on several ranks: the same samples on ranks, and ranks that drift apart.

What torch's trainings get by `train.guards`; texts and times are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from ....comm.world.world import World
from ....train.equal_models import ModelDigests
from ....train.same_data import BatchDigests
from ....train.seed import rank_seed
from ...array_verification import Array, digest_of
from .backends import beginning_of, learning_rates, on_torch, seed_states, shared_weights, to_numpy

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


_MARK = "_farandole_rank_seed"


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
        if getattr(variable, _MARK, False):
            continue
        setattr(variable, _MARK, True)
        state = to_numpy(variable)
        if state is not None and state.shape == (2,):
            own = np.array(state)
            own[0] = rank_seed(int(state[0]), rank) % 2**31  # torch keeps it in 32 bits with a sign
            variable.assign(own)

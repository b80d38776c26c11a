"""Seeds of each rank: a script that seeds all ranks alike gets equal weights, and other dropout masks on each.

[Note: masks] After ``keras.utils.set_random_seed(1)`` all ranks would draw the same masks, so the samples of
ranks would share their noise, and in one process on the joined batch they do not. Layers draw from generators of
seeds, each a variable with a seed and a counter. Before the first step the seed is replaced by a hash of it and of
the rank; rank 0 keeps its own, as one process has it. Nothing is exchanged for it, and the same script draws the
same again. On torch, dropout draws from torch's own generators: they are seeded in the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....train.seed import rank_seed
from .backends import on_torch, seed_states, to_numpy

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

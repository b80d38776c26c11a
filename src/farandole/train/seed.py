"""`fd.seed`: one call for all generators of random numbers of a training."""

from __future__ import annotations

import hashlib
import importlib.util
import random

import torch

from ..comm.world.store_sync import require_same
from ..comm.world.world import world
from ..core.vocabulary.errors import ConfigError

_LIMIT = 2**63
_NUMPY_LIMIT = 2**32


def seed(number: int, *, per_rank: bool = False) -> int:
    """Seed Python's ``random``, NumPy if it is installed, and torch on all devices. Call it on all ranks.

    Workers of a DataLoader are seeded by torch from its own generator, so they follow. Neither `distribute` nor
    `shard` depends on equal seeds: parameters come from rank 0, and the order of the data follows rank 0's seed.

    Args:
        number: the seed, from 0 to 2**63 - 1, the same on all ranks.
        per_rank: give every rank random numbers of its own, for dropout and augmentation; ranks that see the
            same samples (`tensor`, `pipeline`, `context`) have the same. Rank 0 has those of one process. A split
            of the data that is drawn afterwards, without a generator of its own, is another one on each rank.

    Returns:
        The seed of this rank.

    Raises:
        ConfigError: `number` is no integer or out of range.
        Mismatch: the ranks gave different arguments; raised on every rank.
    """
    here = world()
    is_right = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _LIMIT
    # Before the refusal, so that a wrong number on one rank is an error on all.
    require_same(here, "fd.seed", [("seed", number if is_right else repr(number)), ("per_rank", bool(per_rank))])
    if not is_right:
        raise ConfigError(f"seed: expected an integer from 0 to 2**63 - 1, got {number!r}")
    own = rank_seed(number, here.sample_rank) if per_rank else number
    random.seed(own)
    torch.manual_seed(own)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(own % _NUMPY_LIMIT)
    return own


def rank_seed(number: int, rank: int) -> int:
    """Return a seed that is far from those of other ranks and of neighbouring numbers."""
    if rank == 0:
        return number
    digest = hashlib.sha256(f"{number}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _LIMIT

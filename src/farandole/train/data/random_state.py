"""Random numbers that go by the place in the data, so that a resumed run draws those of an uninterrupted one.

[Note: random numbers by place] Three draws of a loader would else depend on what was drawn before them:

1. the order of a sampler of the user's own: it is drawn with generators that are seeded by (seed, epoch) and put
   back as they were afterwards;
2. the seed of worker processes, which torch draws when an iteration begins: it comes from a generator of the
   loader, seeded by (seed, epoch, rank), so that an iteration takes no number of the generators of the training;
3. augmentation in worker processes: each batch of a dataset with indexes begins with seeds of (seed, epoch,
   place of the batch, rank), whichever worker reads it. What a worker process receives is the pickled list of
   indexes, one batch at a time, directly before it reads them: the list seeds the worker where it is unpickled.

The training's own process is left alone: with no workers, augmentation draws from the generators of the rank. A
script that resumes has to restore them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ...parallel.seeds import kept_generators

_LIMIT = 2**63
_NUMPY_LIMIT = 2**32


def seed_of(*place: int) -> int:
    """Return a seed that is far from those of neighbouring places."""
    digest = hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _LIMIT


@contextmanager
def seeded(number: int, source: Any) -> Iterator[None]:
    """Draw with generators that are seeded by `number`: the global ones, and those of the sampler `source`."""
    generators = _generators_of(source)
    with kept_generators(*generators):
        for generator in (torch.default_generator, *generators):
            generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % _NUMPY_LIMIT)
        yield


def generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators on the CPU, to be compared."""
    numpy_state: Any = np.random.get_state()
    _, keys, *rest = numpy_state
    return bytes(torch.default_generator.get_state().numpy()), random.getstate(), keys.tobytes(), tuple(rest)


def _generators_of(source: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for _ in range(4):  # samplers within samplers
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
            found.append(generator)
        source = getattr(source, "sampler", None)
    return found


class SeededIndexes(list[int]):
    """The indexes of a batch, which seed a worker process that receives them."""

    def __init__(self, indexes: list[int], seed: int) -> None:
        super().__init__(indexes)
        self.seed = seed

    def __reduce__(self) -> tuple[Callable[[list[int], int], list[int]], tuple[list[int], int]]:
        return _received, (list(self), self.seed)


def _received(indexes: list[int], seed: int) -> list[int]:
    if get_worker_info() is not None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which queues a call for each batch
        np.random.seed(seed % _NUMPY_LIMIT)
    return indexes

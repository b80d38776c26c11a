"""Random numbers of a divided model: equal where ranks compute the same, different where they do not.

[Note: seeds of a pass] Tensor ranks compute the layers that are not split on the same activations, and dropout
there must drop the same elements, or they train different models without an error. So each forward pass begins
with a seed that tensor ranks have in common and others do not: of the replica, the part of the sequence, and the
number of the pass. Within a split layer ranks hold different elements, and draw different numbers: see
[Note: seeds of a region]. The generator of the script has its own state back when the pass is over.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..comm.device.accelerator import generator_of
from ..comm.world.store_sync import all_gather_json
from .mesh import Mesh
from .model import Strategy

_LARGE = 2**62
_PRIME = 0x9E3779B97F4A7C15


class PassSeeds:
    """The seeds of the forward passes of one divided model."""

    def __init__(self, mesh: Mesh) -> None:
        """Agree on a first seed, rank 0's; to be called by all ranks."""
        here = mesh.here
        self._mesh: Mesh | None = mesh
        self._base = all_gather_json(here, "seed of divided models", torch.initial_seed() % _LARGE)[0]
        self._place = mesh.rank("pipeline", "data", "shard", "expert", "context")
        self._passes = 0
        self._kept: list[torch.Tensor] = []

    def __reduce__(self) -> Any:
        """A copy of the model draws from the script's generator."""
        return (_no_seeds, ())

    def enter(self, *_: Any) -> None:
        """Begin a forward pass."""
        if self._mesh is None:
            return
        self._kept.append(_states(self._mesh.here.device))
        if len(self._kept) == 1:
            self._passes += 1
            _seed(_mixed(self._base, self._place, self._passes), self._mesh.here.device)

    def state_dict(self) -> dict[str, int]:
        """Return the first seed and the number of passes, the same on all ranks."""
        return {"base": self._base, "passes": self._passes}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """Go on with the seeds that `state_dict` told."""
        self._base, self._passes = saved["base"], saved["passes"]

    def leave(self, *_: Any) -> None:
        """End it: the script's generator is as it was."""
        if self._kept and self._mesh is not None:
            _restore(self._kept.pop(), self._mesh.here.device)


def _no_seeds() -> PassSeeds:
    made = PassSeeds.__new__(PassSeeds)
    made._mesh, made._kept = None, []
    return made


class SeededPasses(Strategy):
    """Forward passes of a model that is divided by layers or sequences, seeded as [Note: seeds of a pass] says."""

    keys = ("tensor", "context")

    def apply(self) -> None:
        """See `seed_passes`."""
        self.distributed.seeds = seed_passes(self.model, self.mesh)


def seed_passes(model: nn.Module, mesh: Mesh) -> PassSeeds:
    """Seed the forward passes of `model`. See [Note: seeds of a pass]. To be called by all ranks."""
    seeds = PassSeeds(mesh)
    model.register_forward_pre_hook(seeds.enter)
    model.register_forward_hook(seeds.leave, always_call=True)
    return seeds


@contextmanager
def kept_generators(*generators: torch.Generator) -> Iterator[None]:
    """Put the global generators, and these, back as they were afterwards."""
    generators = (torch.default_generator, *generators)
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _mixed(*numbers: int) -> int:
    value = 0
    for number in numbers:
        value = (value * _PRIME + number + 1) % _LARGE
    return value


def _seed(number: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(number)
    generator = generator_of(device)
    if generator is not None:
        generator.manual_seed(number)


def _states(device: torch.device) -> torch.Tensor:
    own = torch.get_rng_state()
    generator = generator_of(device)
    return own if generator is None else torch.cat([own, generator.get_state()])


def _restore(state: torch.Tensor, device: torch.device) -> None:
    length = torch.get_rng_state().numel()
    torch.set_rng_state(state[:length])
    generator = generator_of(device)
    if generator is not None:
        generator.set_state(state[length:])

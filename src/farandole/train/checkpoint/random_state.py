"""What a rank goes on with: whose part of a checkpoint, and the generators of random numbers.

They are Python's, NumPy's, and torch's on the CPU and on the rank's device.
"""

from __future__ import annotations

import hashlib
import random
import struct
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...comm.device.accelerator import generator_of
from ...core.vocabulary.degrees import OTHER_SAMPLES, Degrees
from ...core.vocabulary.errors import CheckpointError
from ..seed import rank_seed

_OF_THE_HOST = {"seed", "python", "numpy", "torch"}
_PYTHON = struct.Struct("<625I")


@dataclass(frozen=True, slots=True)
class SavedRanks:
    """The ranks that saved a checkpoint, seen from one that loads it."""

    rank: int
    degrees: Degrees
    """The degrees of the mesh here."""
    saved: Degrees
    """The degrees of the mesh that saved."""

    @property
    def is_other_mesh(self) -> bool:
        """Whether the parameters were, or are, divided, and otherwise than now."""
        are_replicas = self.degrees.is_data_alone and self.saved.is_data_alone
        return self.degrees != self.saved and not are_replicas

    @property
    def place(self) -> int:
        """Which part of the samples this rank sees."""
        return self.degrees.rank_over(self.rank, OTHER_SAMPLES)

    @property
    def own(self) -> int | None:
        """The rank whose own state goes on here, in another mesh the first that saw the same samples.

        None if there was none.
        """
        if not self.is_other_mesh:
            return self.rank if self.rank < self.saved.size else None
        first = self.saved.members(0, OTHER_SAMPLES)
        return first[self.place] if self.place < len(first) else None

    def warn_of_codecs(self) -> None:
        """Say that what codecs kept of parameters that were divided otherwise is lost."""
        warnings.warn(
            f"farandole: the checkpoint is of {self.saved}, and there is {self.degrees} here, so what the codecs "
            "had left is dropped",
            RuntimeWarning,
            stacklevel=2,
        )


def read_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators of this process."""
    version, numbers, gauss = random.getstate()
    state = {
        "seed": torch.initial_seed(),
        "python": (version, _PYTHON.pack(*numbers), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    generator = generator_of(device)
    if generator is not None:
        state[device.type] = generator.get_state()
    return state


def require_random_state(state: Any) -> None:
    """Raise `CheckpointError` unless `state` is one that generators can continue with; they are not changed."""
    try:
        version, numbers, gauss = state["python"]
        random.Random().setstate((version, _PYTHON.unpack(numbers), gauss))
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        int(state["seed"])
        for kind in state.keys() - _OF_THE_HOST:
            if not isinstance(state[kind], torch.Tensor):
                raise TypeError(f"the state of {kind}'s generator is a {type(state[kind]).__name__}")
    except (
        AttributeError,
        LookupError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as problem:
        raise CheckpointError(
            f"the checkpoint's states of random numbers cannot be continued: {type(problem).__name__}: {problem}",
            is_input=True,
        ) from None


def write_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue with what `read_random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, _PYTHON.unpack(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    generator = generator_of(device)
    if generator is not None and device.type in state:
        generator.set_state(state[device.type])


def seed_new_rank(state_of_main: dict[str, Any], step: int, rank: int) -> None:
    """Seed a rank that did not exist when the checkpoint was written: by rank 0's seed, the step and the rank."""
    digest = hashlib.sha256(f"{state_of_main['seed']}/{step}".encode()).digest()
    own = rank_seed(int.from_bytes(digest[:8], "big") % 2**63, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)

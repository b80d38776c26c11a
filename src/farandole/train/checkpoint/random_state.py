"""The generators of random numbers of one rank: Python's, NumPy's, torch's on the CPU and on its device."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import numpy as np
import torch

from ..seed import rank_seed

_PYTHON = struct.Struct("<625I")


def read_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators of this process."""
    version, numbers, gauss = random.getstate()
    state = {
        "seed": torch.initial_seed(),
        "python": (version, _PYTHON.pack(*numbers), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def write_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue with what `read_random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, _PYTHON.unpack(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_new_rank(state_of_main: dict[str, Any], step: int, rank: int) -> None:
    """Seed a rank that did not exist when the checkpoint was written: by rank 0's seed, the step and the rank."""
    digest = hashlib.sha256(f"{state_of_main['seed']}/{step}".encode()).digest()
    own = rank_seed(int.from_bytes(digest[:8], "big") % 2**63, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)

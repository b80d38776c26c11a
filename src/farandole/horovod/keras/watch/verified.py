"""A training by `fit` under ``farandole verify``: its batches and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...array_verification import Array, ArrayVerification
from .backends import batches_per_step, is_distributed
from .seeds import OwnSeeds


class FitVerification:
    """A `fits.FitObserver` that tells the verification of its world."""

    wants_batch = True

    def __init__(self, verification: ArrayVerification) -> None:
        self._verification = verification
        self._seeds = OwnSeeds(verification.here.rank)
        verification.is_fit = True

    def begins(self, model: Any, calls: int) -> None:
        """Give the model seeds of this rank, as without ``farandole verify``."""
        if calls < 2 and is_distributed(model):
            self._seeds.give(model)

    def batch(self, arrays: Sequence[Array], *, weighs: bool) -> None:
        """Keep what tells it from others."""
        self._verification.batch(arrays, weighs=weighs)

    def ends(self, model: Any, steps: int) -> None:
        """Count it; after the last step that is wanted the script ends."""
        self._verification.step_ends(batches_per_step(model))

"""Gradients that stay on this rank until a later pass, and the factor they are to be exchanged with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .grad_ownership import GradsAside, scale_grads


class LocalAccumulation:
    """What the passes since the last exchange left in ``parameter.grad``. See [Note: the true mean]."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.passes = 0
        """Backward passes whose gradients have not been exchanged."""
        self.uncounted = 0
        """How many of them are compared with no other rank's: parts of a batch that this rank alone divides so."""
        self.factor = 1.0
        """This rank's share of the samples while they ran, over the mean share."""
        self.aside: GradsAside | None = None
        """The accumulated gradients while the pass of a placeholder runs, whose own must not be added to them."""
        self.parameters = parameters
        self._weighs_nothing = False
        """Whether only placeholders' gradients were accumulated, which were dropped here."""

    def forget_cleared(self) -> None:
        """Begin to count anew where the loop has thrown away what was accumulated: all gradients are None."""
        if not self.passes:
            self._weighs_nothing = False
        elif self.aside is not None or self._weighs_nothing:
            return
        elif all(each.grad is None for each in self.parameters):
            self.passes = self.uncounted = 0

    def share_changes(self, previous: float, factor: float) -> None:
        """Rescale accumulated gradients so that one factor fits them all. See [Note: the true mean].

        Called before the batch of the new factor is used.
        """
        self.restore()
        if not self.passes:
            return
        if factor == 0.0:
            self.aside = GradsAside(self.parameters)  # the coming pass is a placeholder's
            return
        scale, self.factor = self.factor / factor, factor
        self._weighs_nothing = scale == 0.0
        scale_grads(self.parameters, scale)

    def restore(self) -> None:
        """Put back the gradients that were set aside: the placeholder's pass is over."""
        if self.aside is not None:
            self.aside.restore()
            self.aside = None

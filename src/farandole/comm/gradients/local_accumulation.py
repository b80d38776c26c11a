"""Gradients that stay on this rank until a later pass, and the factor they are to be exchanged with."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LocalAccumulation:
    """What the passes since the last exchange left in ``parameter.grad``. See [Note: the true mean]."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.passes = 0
        """Backward passes that are held back."""
        self.factor = 1.0
        """This rank's share of the samples while they ran, over the mean share."""
        self._parameters = parameters
        self._set_aside: list[torch.Tensor | None] | None = None
        self._weighs_nothing = False
        """Whether what is held is a placeholder's alone, whose gradients were dropped here."""

    @property
    def is_set_aside(self) -> bool:
        """Whether the pass that runs is a placeholder, whose gradient must stay away from what is held."""
        return self._set_aside is not None

    def forget_cleared(self) -> None:
        """Begin to count anew where the loop has thrown away what was held: all gradients are None."""
        if not self.passes:
            self._weighs_nothing = False
        elif self.is_set_aside or self._weighs_nothing:
            return
        elif all(each.grad is None for each in self._parameters):
            self.passes = 0

    def share_changes(self, previous: float, factor: float) -> None:
        """Rescale held gradients so that one factor fits them all. See [Note: the true mean].

        Called before the batch of the new factor is used.
        """
        if self.is_set_aside:
            self.restore()
        if not self.passes:
            return
        if factor == 0.0:
            # The coming pass is a placeholder: keep its gradient away from what is held.
            self._set_aside = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
            return
        scale, self.factor = self.factor / factor, factor
        self._weighs_nothing = scale == 0.0
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    if scale == 0.0:
                        parameter.grad = None
                    else:
                        parameter.grad.mul_(scale)

    def restore(self) -> None:
        """Put back the gradients that were set aside: the placeholder's pass is over."""
        assert self._set_aside is not None, "something was set aside"
        for parameter, grad in zip(self._parameters, self._set_aside, strict=True):
            parameter.grad = grad
        self._set_aside = None

"""Tensors to be added to a gradient at its next exchange, by parameter.

Two kinds: what an old codec left unsent when another took its place, and what an optimizer adds to the
gradient (`GradientReducer.add_extra_gradient`). Both wait while no rank has a gradient for the parameter, and
are pending again when the step that they were sent in is dropped; both are this rank's own, in units of its
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .bucket import Bucket

Extra = tuple[torch.Tensor, float]
"""A tensor that belongs to the caller, and what it is to be multiplied by."""


@dataclass
class CarryOver:
    """What is pending for each parameter, by its index. See the module."""

    unsent: dict[int, torch.Tensor] = field(default_factory=dict)
    extra: dict[int, Extra] = field(default_factory=dict)
    is_active: bool = False
    """Whether anything is pending, or was sent in the last exchange."""
    _sent_unsent: dict[int, torch.Tensor] = field(default_factory=dict)
    _sent_extra: dict[int, Extra] = field(default_factory=dict)
    """What the last exchange took along."""

    def keep(self, index: int, unsent: torch.Tensor) -> None:
        """Remember what was not sent, beside what is remembered already."""
        before = self.unsent.get(index)
        self.unsent[index] = unsent if before is None else before + unsent
        self.is_active = True

    def add_extra_gradient(self, index: int, extra: Extra | None) -> None:
        """Add `extra` to the next gradient of the parameter, instead of an earlier one; None: nothing."""
        if extra is None:
            self.extra.pop(index, None)
        else:
            self.extra[index] = extra
            self.is_active = True

    def has_pending(self, index: int) -> bool:
        """Return whether an extra gradient has not been sent yet."""
        return index in self.extra

    def rescale(self, change: float) -> None:
        """Multiply what was not sent, for gradients are in other units now."""
        self.unsent = {index: unsent * change for index, unsent in self.unsent.items()}

    def add_to(self, bucket: Bucket) -> None:
        """Add to a bucket that is loaded what is pending for its members."""
        for position, index in enumerate(bucket.members):
            if index in self.unsent:
                bucket.add(position, self.unsent[index], 1.0)
            if index in self.extra:
                bucket.add(position, *self.extra[index])

    def settle(self, exchanged: list[int]) -> None:
        """Note what an exchange has taken along, given the parameters that have their mean now."""
        self._sent_unsent = {index: self.unsent.pop(index) for index in exchanged if index in self.unsent}
        self._sent_extra = {index: self.extra.pop(index) for index in exchanged if index in self.extra}
        self.is_active = bool(self.unsent or self.extra or self._sent_unsent or self._sent_extra)

    def roll_back(self, index: int) -> None:
        """Have pending again what the last exchange took along: its step was dropped."""
        if index in self._sent_unsent:
            self.keep(index, self._sent_unsent.pop(index))
        if index in self._sent_extra:
            self.extra.setdefault(index, self._sent_extra.pop(index))

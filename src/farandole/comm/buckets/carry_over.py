"""What is to be added to a gradient when it travels next, by parameter.

Two kinds: what an old codec left unsent when another took its place, and what an optimizer asks for beside the
gradient (`GradientEngine.ask_more`). Both wait while no rank has a gradient for the parameter, and are owed
again when the step is dropped that they were sent in; both are this rank's own, in units of its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .bucket import Bucket


@dataclass
class CarryOver:
    """What each parameter, by its index, has coming. See the module."""

    unsent: dict[int, torch.Tensor] = field(default_factory=dict)
    asked: dict[int, tuple[torch.Tensor, float]] = field(default_factory=dict)
    """Tensors that belong to others, and what they are to be multiplied by."""
    _sent_unsent: dict[int, torch.Tensor] = field(default_factory=dict)
    _sent_asked: dict[int, tuple[torch.Tensor, float]] = field(default_factory=dict)
    """What the last exchange took along."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be added to any gradient."""
        return not self.unsent and not self.asked

    def keep(self, index: int, unsent: torch.Tensor) -> None:
        """Remember what was not sent, beside what is remembered already."""
        before = self.unsent.get(index)
        self.unsent[index] = unsent if before is None else before + unsent

    def rescale(self, change: float) -> None:
        """Multiply what was not sent, for gradients are in other units now."""
        self.unsent = {index: unsent * change for index, unsent in self.unsent.items()}

    def add_to(self, bucket: Bucket) -> None:
        """Add to a bucket that is loaded what its members have coming."""
        if self.is_empty:
            return
        for position, index in enumerate(bucket.members):
            if index in self.unsent:
                bucket.add(position, self.unsent[index], 1.0)
            if index in self.asked:
                bucket.add(position, *self.asked[index])

    def forget(self, index: int) -> None:
        """It is in the gradient now."""
        if index in self.unsent:
            self._sent_unsent[index] = self.unsent.pop(index)
        if index in self.asked:
            self._sent_asked[index] = self.asked.pop(index)

    def begin(self) -> None:
        """Another exchange begins: what the last one took along has arrived for good."""
        self._sent_unsent, self._sent_asked = {}, {}

    def take_back(self, index: int) -> None:
        """Owe again what the last exchange took along: its mean is used by nobody."""
        if index in self._sent_unsent:
            self.keep(index, self._sent_unsent.pop(index))
        if index in self._sent_asked:
            self.asked.setdefault(index, self._sent_asked.pop(index))

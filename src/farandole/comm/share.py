"""How much of the global batch this rank holds, so that a mean over ranks is the mean over samples.

[Note: the true mean] A rank's loss is the mean over its own samples. With n_r of N samples on rank r,
the mean over all samples is the sum of (n_r / N) times each rank's gradient: with equal batches that is
the plain average of the ranks, with a short last batch it is not. `factor` is n_r x size / N: 1 when
batches are equal, 0 for a rank whose batch is only a placeholder. The loader knows it without asking
anybody, because every rank computes the same division of the data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class BatchShare:
    """The current factor, and who wants to know before it changes."""

    factor: float = 1.0
    _listeners: list[weakref.WeakMethod[Callable[[float, float], None]]] = field(default_factory=list)

    def set(self, factor: float) -> None:
        """Announce the factor of the batch that is about to be used."""
        if factor == self.factor:
            return
        previous, self.factor = self.factor, factor
        self._listeners = [listener for listener in self._listeners if listener() is not None]
        for listener in self._listeners:
            call = listener()
            if call is not None:
                call(previous, factor)

    def subscribe(self, listener: Callable[[float, float], None]) -> None:
        """Call the bound method `listener(previous, new)` on every change, for as long as its object lives."""
        self._listeners.append(weakref.WeakMethod(listener))

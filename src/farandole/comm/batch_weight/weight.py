"""How much of the global batch this rank holds, so that a mean over ranks is the mean over samples.

[Note: the true mean] A rank's loss is the mean over its own samples. With n_r of N samples on rank r,
the mean over all samples is the sum of (n_r / N) times each rank's gradient: with equal batches that is
the plain average of the ranks, with a short last batch it is not. `factor` is n_r x size / N: 1 when
batches are equal, 0 for a rank whose batch is only a placeholder. The loader knows it without
a message, because every rank computes the same division of the data. Which batch is in use: `drawn_batches`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...core.vocabulary.errors import ConfigError
from .drawn_batches import Ask, DrawnBatches, Origin


@dataclass
class BatchWeight:
    """The current factor, and who wants to know before it changes."""

    factor: float = 1.0
    watches: bool = False
    """Whether batches may be unequal, so that it matters which of them is in use."""
    _listeners: list[weakref.WeakMethod[Callable[[float, float], None]]] = field(default_factory=list)
    _drawn: DrawnBatches = field(default_factory=DrawnBatches)
    _thread: int = field(default_factory=threading.get_ident)
    _entered: float | None = None
    """The factor that a forward pass told since the last backward pass began; None: there was none."""
    _task: int = -1
    """The backward pass whose factor is known, by autograd's number, and that factor."""
    _task_factor: float = 1.0

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
        self._listeners = [each for each in self._listeners if each() is not None]
        self._listeners.append(weakref.WeakMethod(listener))

    # -- see [Note: shares follow the batch] ------------------------------------------------

    def hand_out(self, batch: Any, factor: float, samples: int, origin: Origin) -> None:
        """A loader hands out `batch`: it is in use from now on, unless forward passes say otherwise."""
        if self.watches:
            self._drawn.add(batch, factor, samples, origin)
        if threading.get_ident() == self._thread:
            self.set(factor)

    def loop_ends(self, origin: Origin) -> None:
        """The loop over a loader has ended, by itself or by ``break``."""
        if self.watches:
            self._drawn.loop_ends(origin)
        if threading.get_ident() == self._thread:
            self.set(1.0)

    def forward_begins(self, inputs: Any, ask: Ask) -> float:
        """Take the factor of the batch whose tensors `inputs` are, and return it."""
        factor = self._drawn.used_by(inputs, ask)
        self._entered = factor
        self.set(factor)
        return factor

    def backward_begins(self, task: int, factor: float) -> None:
        """Take the factor of the forward pass that backward pass `task` starts from."""
        if task != self._task:
            self._task, self._task_factor = task, factor
            self.set(factor)
        elif factor != self._task_factor:
            raise ConfigError(
                "one backward pass holds the losses of two batches that weigh differently (this rank's shares of "
                f"them are {self._task_factor:.4g} and {factor:.4g} times the mean share)",
                remedy="call backward() for each, or use drop_last=True for both loaders",
            )

    def pass_opens(self, task: int) -> float:
        """Return the factor of backward pass `task`, whose first gradient is ready."""
        if self.watches and task != self._task:
            factor = self._drawn.used_unseen() if self._entered is None else self._entered
            self._task, self._task_factor = task, self.factor if factor is None else factor
            self.set(self._task_factor)
        self._entered = None
        return self.factor

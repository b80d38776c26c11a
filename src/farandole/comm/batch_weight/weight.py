"""How much of the global batch this rank holds, so that a mean over ranks is the mean over samples.

[Note: the true mean] A rank's loss is the mean over its own samples. With n_r of N samples on rank r,
the mean over all samples is the sum of (n_r / N) times each rank's gradient: with equal batches that is
the plain average of the ranks, with a short last batch it is not. `factor` is n_r x size / N: 1 when
batches are equal, 0 for a rank whose batch is only a placeholder. The loader knows it without
a message, because every rank computes the same division of the data. Which batch is in use: `drawn_batches`.

[Note: weights by count] A loss that is a mean over tokens has as its n_r the tokens of rank r. Only the loop knows
them: it gives its count with `fd.weight`, the ranks add up their counts, and the factor that comes of it stands in
for that of the samples until the next call. A placeholder counts for nothing whatever its tokens. The loop must
give a count for each step: gradients that would go by the count of an earlier step are refused.

Ranks that shuffle by different epochs lose and repeat samples, and nothing else shows it. A loop that goes back
and forth between loaders within their epochs may do so differently on each rank, and is not compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...core.vocabulary.errors import ConfigError
from .drawn_batches import Ask, DrawnBatches, Origin
from .listeners import Listeners


# Which epoch the samples of a batch are of: compared between the ranks at each exchange of gradients.
class EpochInUse:
    """The epoch of the batch that was handed out last, in the thread that trains."""

    def __init__(self) -> None:
        self._current: Origin | None = None
        self._left_open: set[Origin] = set()
        """Loops that another one came between before they ended."""
        self._is_mixed = False
        self.number = 0
        """What must be equal on all ranks; 0 where there is nothing to compare."""

    def hand_out(self, origin: Origin) -> None:
        """A batch of `origin` is used next."""
        if origin == self._current:
            return
        if self._current is not None:
            self._left_open.add(self._current)
        self._is_mixed = self._is_mixed or origin in self._left_open
        self._current = origin
        self.number = 0 if self._is_mixed else origin.order

    def loop_ends(self, origin: Origin) -> None:
        """No more batches come from `origin`."""
        self._left_open.discard(origin)
        if self._current == origin:
            self._current = None
            self.number = 0


# How many samples of this rank a backward pass is of, where a loader of `fd.shard` knows.
class SamplesInUse:
    """The samples of the batch that was handed out last."""

    def __init__(self) -> None:
        self._by_loader: dict[int, int] = {}
        """Batches that were handed out and that no backward pass has followed."""
        self._known: int | None = None

    def hand_out(self, loader: int, samples: int) -> None:
        """A loader, by its number, hands out a batch of so many samples of this rank; 0 for a placeholder."""
        self._by_loader[loader] = samples

    def of_pass(self) -> int | None:
        """Return the samples of the backward pass that begins; None: not known.

        Several passes may use one batch. Batches of two loaders in one pass are not added up: what its loss is
        a mean over is not known.
        """
        if self._by_loader:
            several = [*self._by_loader.values()]
            self._known = several[0] if len(several) == 1 else None
            self._by_loader.clear()
        return self._known


@dataclass
class BatchWeight:
    """The current factor, and who wants to know before it changes."""

    factor: float = 1.0
    by_samples: float = 1.0
    """The factor by samples, which is `factor` unless the loop gave a count. See [Note: weights by count]."""
    count_number: int = 0
    """Which of the loop's counts is in use; 0: none."""
    watches: bool = False
    """Whether batches may be unequal, so that it matters which of them is in use."""
    epoch: EpochInUse = field(default_factory=EpochInUse)
    """Which epoch the samples are of."""
    samples: SamplesInUse = field(default_factory=SamplesInUse)
    """How many they are."""
    _listeners: Listeners = field(default_factory=Listeners)
    _drawn: DrawnBatches = field(default_factory=DrawnBatches)
    _thread: int = field(default_factory=threading.get_ident)
    _entered: float | None = None
    """The factor that a forward pass told since the last backward pass began; None: there was none."""
    _task: int = -1
    """The backward pass whose factor is known, by autograd's number, and that factor."""
    _task_factor: float = 1.0
    _counts_given: int = 0
    _is_placeholder: bool = False
    """Whether the batch in use was a placeholder when the count was given."""

    def set(self, factor: float) -> None:
        """Announce the factor by samples of the batch that is about to be used."""
        self.by_samples = factor
        if not self.count_number:
            self._announce(factor)

    def set_by_count(self, factor: float | None) -> None:
        """Announce the factor by count, which stays until the next call; None: by samples again."""
        if factor is None:
            self.count_number = 0
        else:
            self._counts_given += 1
            self.count_number, self._is_placeholder = self._counts_given, self.by_samples == 0.0
        self._announce(self.by_samples if factor is None else factor)

    def at_backward(self, factor: float) -> float:
        """Return the factor in a backward pass whose forward pass had `factor`."""
        return self.factor if self.count_number else factor

    def _announce(self, factor: float) -> None:
        if factor == self.factor:
            return
        previous, self.factor = self.factor, factor
        self._listeners(previous, factor)

    def subscribe(self, listener: Callable[[float, float], None]) -> None:
        """Call the bound method `listener(previous, new)` on every change, for as long as its object lives."""
        self._listeners.add(listener)

    # -- see [Note: shares follow the batch] ------------------------------------------------

    def hand_out(self, batch: Any, factor: float, samples: int, origin: Origin) -> None:
        """A loader hands out `batch`: it is in use from now on, unless forward passes say otherwise."""
        if self.watches:
            self._drawn.add(batch, factor, samples, origin)
        if threading.get_ident() == self._thread:
            self.epoch.hand_out(origin)
            self.samples.hand_out(origin.loader, samples)
            self.set(factor)

    def loop_ends(self, origin: Origin) -> None:
        """The loop over a loader has ended, by itself or by ``break``."""
        if self.watches:
            self._drawn.loop_ends(origin)
        if threading.get_ident() == self._thread:
            self.epoch.loop_ends(origin)
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
        if self.count_number and (self.by_samples == 0.0) != self._is_placeholder:
            raise ConfigError(
                "fd.weight was given the count of another batch than the one in use: batches were drawn ahead, "
                "and one of the two is a placeholder",
                remedy="call fd.weight between the forward pass of the batch and backward()",
            )
        return self.factor

"""Several exchanges as one, where some parameters of a model meet those of other ranks than the rest does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .step_hooks import StepExchange


class SeveralExchanges:
    """A `StepExchange` of several, of which the first alone has codecs and weighs the batch."""

    def __init__(self, first: StepExchange, *others: StepExchange) -> None:
        self._first, self._all = first, (first, *others)

    @property
    def accumulate(self) -> int:
        """See `StepExchange`."""
        return self._first.accumulate

    @property
    def is_open(self) -> bool:
        """See `StepExchange`."""
        return all(each.is_open for each in self._all)

    @property
    def exchanges_done(self) -> int:
        """See `StepExchange`."""
        return sum(each.exchanges_done for each in self._all)

    @property
    def passes_held(self) -> int:
        """See `StepExchange`."""
        return max(each.passes_held for each in self._all)

    @property
    def share_of_batch(self) -> float:
        """See `StepExchange`."""
        return self._first.share_of_batch

    @property
    def follows_loss_scale(self) -> bool:
        """See `StepExchange`."""
        return self._first.follows_loss_scale

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """See `StepExchange`."""
        self._first.follow_loss_scale(read)

    def flush(self, is_dropped: Callable[[], bool] = lambda: False) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.flush(is_dropped)

    def exchange_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.exchange_written(parameters)

    def note_used(self) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.note_used()

    def note_step(self) -> None:
        """See `StepExchange`."""
        for each in self._all:
            each.note_step()

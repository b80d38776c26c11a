"""The exchange of gradients where experts are divided: which parameters travel among which ranks.

See [Note: gradients of experts] in `expert_ranks`: what the reducer of experts takes is weighed already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...comm.batch_weight import BatchWeight
from ...comm.reducer.options import ReducerOptions
from ...comm.reducer.reducer import GradientReducer
from ...core.vocabulary.codec_spec import NONE
from ..data.model_changes import class_of
from ..model import Strategy
from ..optim.step_hooks import StepExchange
from ..split import is_of_expert


class ExpertGradients(Strategy):
    """The gradients of the experts of a rank meet those of the ranks that have the same ones.

    They travel as they are, whatever the plan's codec is.
    """

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Where several ranks have the same experts, and others have other ones."""
        mesh = self.mesh
        return self.distributed.exchanges and mesh.size("expert") > 1 and mesh.size(*_SAME_EXPERTS) > 1

    def apply(self) -> None:
        """Let a reducer of their own exchange them, beside that of all other parameters."""
        part = self.mesh.part(*_SAME_EXPERTS)  # made by all ranks: a stage without experts too
        own = self.distributed
        experts = [(name, each) for name, each in own.parameters_here(self.model) if is_of_expert(each)]
        if not experts:
            return
        part.session.batch_weight = BatchWeight()
        exact = replace(self.plan, codec=NONE, codec_for={}, lossy=False)
        options = ReducerOptions(model=f"{class_of(self.model)}, its experts")
        assert own.exchange is not None, "there are several replicas"
        own.exchange = SeveralExchanges(own.exchange, GradientReducer(part, experts, exact, options))


_SAME_EXPERTS = ("data", "shard", "context")
"""The degrees in which ranks differ that have the same experts."""


# Several exchanges as one, where some parameters of a model meet those of other ranks than the rest does.


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

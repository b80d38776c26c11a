"""Attributes of Horovod's distributed optimizer that programs read beside its methods; most are private there."""

from __future__ import annotations

from typing import Any

import torch

from ....comm.gradients.grad_ownership import zero_missing_grads
from ..compression import codec_for
from ..ops.allreduce import ReduceOptions, begin_allreduce
from .gradient_exchange import GradientExchange
from .optimizer_names import find_duplicates


class HorovodAttributes:
    """What `DistributedOptimizer` has of Horovod's names; nothing of ours reads them."""

    _exchange: GradientExchange

    find_duplicates = staticmethod(find_duplicates)

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients travel as dense ones."""
        return self._exchange.settings.sparse_as_dense

    @property
    def _compression(self) -> Any:
        return self._exchange.settings.compression

    @property
    def _groups(self) -> list[list[torch.Tensor]] | None:
        by_name = {name: parameter for parameter, name in self._exchange.names.items()}
        groups = [[by_name[name] for name in group] for group in self._exchange.settings.groups]
        return groups or None

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """Backward passes until each gradient is exchanged."""
        return self._exchange.passes_due()

    @property
    def _grad_accs(self) -> list[Any]:
        """Horovod's own hooks hang on these; ours do not."""
        return []

    def _register_hooks(self) -> None:
        """Do nothing: hooks are made with the optimizer, and anew in a world that is new."""

    def _allreduce_grad_async(self, p: torch.nn.Parameter) -> tuple[int, Any]:
        """Begin an allreduce of one gradient, beside what the optimizer does; return handle and context."""
        zero_missing_grads([p])
        assert p.grad is not None, "just given"
        settings, name = self._exchange.settings, self._exchange.names[p]
        small, context = settings.compression.compress(p.grad)
        handle = begin_allreduce(
            [small],
            [f"allreduce.{name}"],
            ReduceOptions(settings.op, process_set=settings.process_set),
            in_place=True,
            codecs=[codec_for(settings.compression, small)],
        )
        return handle, context

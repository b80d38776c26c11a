"""`hvd.elastic` for PyTorch.

::

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.elastic import run_fn
from ...exchange.names import meet_again
from .sampler import ElasticSampler
from .state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, ...)` go on when ranks die, or hosts come or go.

    `func` is begun again with the state of the last commit (after a failure) or as it is (when hosts came or went
    and all ranks left together); so it must take epoch and batch from `state`.
    """
    return run_fn(func, meet_again)

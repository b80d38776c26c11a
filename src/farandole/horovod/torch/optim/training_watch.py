"""Records of a training with `DistributedOptimizer`: the model and its data loaders are found automatically.

The steps are the optimizer's; the model is found when it is first called, so the first forward pass is not seen.
Waits for batches are those of all of torch's loaders; one of another kind is shown by
``farandole.record(model, optimizer, loader)``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ....comm.reducer.reducer import GradientReducer
from ....comm.world.world import World
from ....parallel.instrument.find_model import ModelFinder
from ....parallel.instrument.phase_hooks import watch_model, watch_optimizer
from ....train.data.loader_watch import watch_loaders


class TrainingWatch:
    """What is recorded of one distributed optimizer, through all the worlds it lives in."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._finder: ModelFinder | None = None
        self._reducer: weakref.ref[GradientReducer] | None = None

    def attach(
        self,
        optimizer: Optimizer,
        here: World,
        reducer: GradientReducer | None,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Record in a world that is new."""
        watch_optimizer(optimizer, here)
        watch_loaders(here)
        self._reducer = None if reducer is None else weakref.ref(reducer)
        model = None if self._model is None else self._model()
        if model is not None:
            self._found(model)
        elif self._finder is None:
            watch = weakref.WeakMethod(self._found)
            self._finder = ModelFinder(parameters, lambda found: _tell(watch, found))
            weakref.finalize(self, self._finder.close)

    def _found(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        watch_model(model, None if self._reducer is None else self._reducer())


def _tell(watch: weakref.WeakMethod[Any], model: nn.Module) -> None:
    found = watch()
    if found is not None:
        found(model)

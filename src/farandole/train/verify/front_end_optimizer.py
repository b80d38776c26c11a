"""An optimizer of a front end that is given no model, Horovod's for PyTorch: its parameters are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm.world.world import World
from .verify import Check, check_gradients, check_optimizer, check_parameters

_ALIKE = (
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step; change the model on all "
    "ranks alike"
)


@dataclass(frozen=True)
class FrontEndOptimizer:
    """One that steps with the gradients of `ranks` ranks."""

    optimizer: Optimizer
    names: Mapping[torch.Tensor, str]
    """Names of its parameters."""
    ranks: int

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters whose gradients are exchanged, as a model does."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.names:
                    yield self.names[parameter], parameter

    def trains(self, model: nn.Module) -> bool:
        """Return whether a parameter of `model` is among them."""
        return any(parameter in self.names for parameter in model.parameters())

    def checks(self, here: World) -> list[Check]:
        """Return the answers; to be called by all ranks."""
        if self.ranks < here.size:
            why = f"gradients are exchanged within a process set of {self.ranks} ranks: verify compares all"
            return [Check("parameters", None, why)]
        return [
            check_parameters(here, self, _ALIKE),
            check_gradients(here, self),
            check_optimizer(here, self.optimizer, self, _ALIKE),
        ]


class FollowedOptimizers(list[FrontEndOptimizer]):
    """Those of one world, kept by its session."""


def followed_here(here: World) -> FollowedOptimizers:
    """Return them."""
    return here.session.keep(FollowedOptimizers, FollowedOptimizers)

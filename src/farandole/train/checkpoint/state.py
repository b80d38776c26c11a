"""What a checkpoint consists of: the objects of a training, and their state as tensors and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from ...checkpoint.encoding import encode
from ...comm.world.world import World
from ...core.vocabulary.errors import CheckpointError
from ...parallel.apply import plan_of
from ...parallel.exchange_state import exchange_state
from .optimizers import parameter_names, read_optimizer
from .random_state import read_random_state
from .values import TensorsAside


@dataclass(frozen=True, slots=True)
class Training:
    """The objects whose state is saved, by the names that they have in the checkpoint."""

    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    others: Mapping[str, Any]
    """Anything else with `state_dict`: schedulers, scaler, loader."""

    @property
    def model(self) -> nn.Module:
        """The model whose gradients are exchanged."""
        return self.modules["model"]

    @property
    def names(self) -> dict[int, str]:
        """Name of each parameter, by its identity."""
        return parameter_names(self.modules)


def make_training(model: nn.Module, optimizer: Optimizer | None, others: Mapping[str, Any]) -> Training:
    """Sort the arguments of `fd.save`; raise `CheckpointError` for one that has no state."""
    modules, optimizers, rest = {"model": model}, {}, {}
    if optimizer is not None:
        optimizers["optimizer"] = optimizer
    for name, value in others.items():
        if isinstance(value, nn.Module):
            modules[name] = value
        elif isinstance(value, Optimizer):
            optimizers[name] = value
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            rest[name] = value
        else:
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict", is_input=True
            )
    return Training(modules, optimizers, rest)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a training on one rank, at one moment. The tensors are the live ones."""

    tensors: Mapping[str, torch.Tensor]
    """Those that ranks share: replicated, or sharded as DTensors."""
    shared: Any
    """What refers to them, as JSON."""
    own_tensors: Mapping[str, torch.Tensor]
    own: Any
    """What this rank has of its own, as JSON."""


def read_state(training: Training, here: World) -> TrainingState:
    """Return the state of a training. Raises `CheckpointError` for what has no form in a checkpoint."""
    weights, states = TensorsAside(ties=True), TensorsAside()
    own = TensorsAside(f"rank-{here.rank:05d}/")
    names = training.names
    modules = {
        name: encode(dict(get_model_state_dict(module)), name, weights)
        for name, module in training.modules.items()
    }
    optimizers = {
        name: encode(read_optimizer(each, names), name, states) for name, each in training.optimizers.items()
    }
    others = {name: encode(each.state_dict(), name, own) for name, each in training.others.items()}
    codecs = exchange_state(training.model) if plan_of(training.model) is not None else {}
    mine = {
        "others": others,
        "random": encode(read_random_state(here.device), "random", own),
        "exchange": encode(codecs, "exchange", own),
    }
    return TrainingState(
        {**weights.tensors, **states.tensors}, {"modules": modules, "optimizers": optimizers}, own.tensors, mine
    )

"""What `fd.distribute` was given and cannot take, by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.vocabulary.errors import ConfigError


def refuse_wrong_kinds(model: Any, optimizers: Sequence[Any], distributed: Collection[nn.Module]) -> None:
    """Raise `ConfigError` for what is no model, or no optimizer. `distributed`: the models that are already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"distribute: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "distribute: the model is wrapped in DistributedDataParallel",
            remedy="give the bare model; distribute does what the wrapper did",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"distribute: the model is scripted (a {type(model).__name__}), and takes no hooks",
            remedy="give the module that was scripted",
        )
    if model in distributed:
        raise ConfigError("distribute: this model is distributed already", remedy="call it once a model")
    if not optimizers:
        raise ConfigError("distribute: the list of optimizers is empty")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"distribute: expected a torch.optim.Optimizer, got {type(each).__name__}")


def refuse_renormed(model: nn.Module) -> None:
    """Raise `ConfigError` for layers whose forward pass changes parameters, on each rank by its own batch."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"distribute: {name or 'the model'!r} is {type(module).__name__} with max_norm={module.max_norm}: "
                "its forward pass changes the rows that it reads, which are others on each rank",
                remedy="make it without max_norm, and after each step, under torch.no_grad(): "
                f"weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm:g}))",
            )


def refuse_strangers(
    model: nn.Module, optimizers: Sequence[Optimizer], distributed: Collection[nn.Module]
) -> None:
    """An optimizer's parameter outside the model would never meet the other ranks' gradients."""
    known = {id(parameter) for other in (model, *distributed) for parameter in other.parameters()}
    for i, each in enumerate(optimizers):
        strangers = [p for group in each.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise ConfigError(
                f"optimizer {i} holds {len(strangers)} parameters that are not the model's (shapes {shapes})",
                remedy="give one torch.nn.ModuleList of all modules that are trained",
            )

"""What stage 3 cannot shard, said by name before anything changes: modules, parameters, sparse layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ....comm.world.world import World
from ....core.vocabulary.errors import ConfigError
from ...frozen.frozen_weight import FrozenWeight


def refuse_unshardable(here: World, model: nn.Module) -> None:
    """Raise `ConfigError` for a model that torch's `fully_shard` would not take, or would train otherwise."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and type(model).forward is nn.Module.forward:
        raise ConfigError(
            f"zero = 3: the model is a {type(model).__name__}, which has no forward pass to gather parameters for",
            remedy="give one torch.nn.Module whose forward calls the parts",
        )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"zero = 3: {_place(name)} went through fully_shard already",
                remedy="leave fully_shard out; distribute does what it does",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"zero = 3: {_place(name)} gives sparse gradients, which cannot be sharded",
                remedy="make it with sparse=False, or use zero = 0",
            )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, FrozenWeight):
            _refuse_parameter(here, name, parameter)


def _refuse_parameter(here: World, name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ConfigError(
            f"zero = 3: parameter {name!r} is a DTensor already", remedy="give a model with plain parameters"
        )
    if type(parameter) is not nn.Parameter:
        raise ConfigError(
            f"zero = 3: parameter {name!r} is a {type(parameter).__name__}, expected a plain torch.nn.Parameter",
            remedy="use zero = 0, or replace it by a plain parameter",
        )
    if parameter.dim() == 0:
        raise ConfigError(
            f"zero = 3: parameter {name!r} has no dimension to shard along",
            remedy=f"make it a tensor of one element: torch.nn.Parameter({name.rpartition('.')[2]}.reshape(1))",
        )
    if parameter.is_complex():
        raise ConfigError(
            f"zero = 3: parameter {name!r} is complex, which fully_shard does not reduce",
            remedy="keep real and imaginary parts (torch.view_as_real), or use zero = 0",
        )
    if not parameter.is_contiguous():
        raise ConfigError(
            f"zero = 3: parameter {name!r} of shape {tuple(parameter.shape)} is not contiguous (strides "
            f"{parameter.stride()})",
            remedy="call model.to(memory_format=torch.contiguous_format) before distribute",
        )
    if parameter.device.type != here.device.type:
        raise ConfigError(
            f"zero = 3: parameter {name!r} is on {parameter.device}, and this rank's device is {here.device}",
            remedy="move the whole model to farandole.world().device before distribute",
        )


def refuse_mixed_types(
    name: str, parameters: Sequence[tuple[str, nn.Parameter]], narrowed: Collection[nn.Parameter]
) -> None:
    """Raise `ConfigError` where trained parameters that travel together have several types.

    `narrowed`: the parameters that will be bfloat16, by the plan key `bf16_parameters`.
    """
    first: dict[torch.dtype, str] = {}
    for label, parameter in parameters:
        if parameter.requires_grad:
            first.setdefault(torch.bfloat16 if parameter in narrowed else parameter.dtype, label)
    if len(first) > 1:
        shown = ", ".join(f"{label!r} is {str(dtype).removeprefix('torch.')}" for dtype, label in first.items())
        remedy = "convert the model to one type and use torch.autocast for others"
        if narrowed:
            shown += " (bf16_parameters leaves normalisations with running statistics in float32)"
            remedy = "set zero = 2, leave bf16_parameters out, or use LayerNorm or GroupNorm"
        raise ConfigError(
            f"zero = 3: parameters of {_place(name)} have several types, and are reduced together: {shown}",
            remedy=remedy,
        )


def _place(name: str) -> str:
    return f"module {name!r}" if name else "the model"

"""What packing parameters has lost of the rows that each rank owns, as part of a checkpoint.

At ZeRO stages 1 and 2 with plan key ``weight_codec`` all ranks hold the parameters as they were packed, and the
owner of rows remembers what that lost. It belongs to the parameters and not to ranks: saved once, and divided anew
over any number of ranks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .sharded_step import ShardedStep
from .state_shards import StateShard

_steps: weakref.WeakKeyDictionary[nn.Module, Sequence[ShardedStep]] = weakref.WeakKeyDictionary()


def note_steps(model: nn.Module, steps: Sequence[ShardedStep]) -> None:
    """Note which optimizers' steps update rows of `model`."""
    _steps[model] = steps


def packs_weights(model: nn.Module) -> bool:
    """Return whether the parameters of a model travel packed, so that something can be lost."""
    return any(step.packs for step in _steps.get(model, ()))


def weight_residuals(model: nn.Module) -> dict[str, StateShard]:
    """Return what was lost so far, by name of the parameter and in its shape; this rank has its rows."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [pair for step in _steps.get(model, ()) for pair in step.lost()]
    return {names[id(parameter)]: lost for parameter, lost in found if id(parameter) in names}


def load_weight_residuals(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Replace what was lost by what `weight_residuals` returned, whole; to be called by all ranks."""
    parameters = dict(model.named_parameters())
    for step in _steps.get(model, ()):
        step.load_lost({parameters[name]: whole for name, whole in saved.items() if name in parameters})


def warn_of_lost_weights() -> None:
    """Say that the parameters of a checkpoint go on as all ranks had them, without what packing lost."""
    warnings.warn(
        'farandole: the checkpoint holds what weight_codec = "int8" has lost of the parameters; nothing is packed '
        "here, so it is dropped, and the parameters go on as all ranks had them",
        RuntimeWarning,
        stacklevel=2,
    )

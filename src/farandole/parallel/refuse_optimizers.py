"""What a plan and an optimizer cannot do together, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from ..comm.world.world import World
from ..core.vocabulary.degrees import Degrees
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.spec import Plan
from .optim.elementwise import why_not_by_parameters, why_not_elementwise


def refuse_indivisible(optimizers: Sequence[Optimizer], degrees: Degrees) -> None:
    """Raise `ConfigError` for optimizers that need whole parameters, or all of them, where a rank has a part."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if degrees.pipeline > 1 and isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"plan: pipeline = {degrees.pipeline}, but {kind} joins all parameters into one vector, and a "
                "rank has those of its stage",
                remedy="use an optimizer that treats each parameter alone, such as torch.optim.AdamW",
            )
        why = why_not_by_parameters(optimizer) if degrees.pipeline > 1 else ""
        if why:
            raise ConfigError(
                f"plan: pipeline = {degrees.pipeline} leaves a rank the parameters of its stage, and the work of "
                f"{kind} cannot be divided: {why}",
                remedy="use an optimizer that treats each parameter alone, such as torch.optim.AdamW",
            )
        divided = [name for name in ("tensor", "expert") if getattr(degrees, name) > 1]
        why = why_not_elementwise(optimizer) if divided else ""
        if why:
            raise ConfigError(
                f"plan: {divided[0]} = {getattr(degrees, divided[0])}: {kind} cannot update parts of parameters: "
                f"{why}",
                remedy="use an optimizer that works element by element, such as torch.optim.AdamW",
            )


def refuse_rows(here: World, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Raise `ConfigError` for optimizers whose work stages 1 and 2 cannot divide by rows."""
    for optimizer in optimizers if here.size > 1 and plan.zero in (1, 2) else []:
        why = why_not_elementwise(optimizer)
        if why:
            raise ConfigError(
                f"plan: zero = {plan.zero} divides the work of the optimizer by rows, but that of "
                f"{type(optimizer).__name__} cannot be divided: {why}",
                remedy="use one that works element by element, such as torch.optim.AdamW, or set zero = 0",
            )

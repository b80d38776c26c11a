"""What an accelerator cannot have yet: gradients that travel by messages.

Messages are read from CPU memory and written into it. Only the backend's all-reduce takes gradients
from where they are: so with a model on an accelerator the exact mean by route ``flat`` works, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ..world.store_sync import all_gather_json
from ..world.world import World

REMEDY = 'on an accelerator use codec "none" and route "auto" or "flat"'
_REMEDY_OF_SHARDS = "on an accelerator use zero = 3, or 0"
_ROUTES = ("server", "sharded_server")


def device_type_of(parameters: Sequence[torch.Tensor]) -> str:
    """Return the kind of device that `parameters` are on: another than ``cpu`` where one of them is elsewhere."""
    return next((parameter.device.type for parameter in parameters if not parameter.is_cpu), "cpu")


def refuse_messages(
    world: World,
    parameters: Sequence[tuple[str, torch.Tensor]],
    plan: Plan,
    *,
    codecs: Sequence[str],
    shards: bool = False,
) -> None:
    """Raise `PlanError`, on every rank, when gradients would travel by messages from an accelerator's memory.

    `codecs`: those that are asked for; none when gradients are exact. `shards`: whether each rank gets a part of
    the sums alone. To be called by all ranks.
    """
    requested = [f"zero = {plan.zero}"] if shards else []
    requested += [f"codec {codec!r}" for codec in codecs]
    requested += [f"route {plan.route!r}"] if plan.route in _ROUTES else []
    requested += ["switches"] if plan.ranks_per_switch or plan.switch_of else []
    if not requested or world.size == 1:
        return
    local = [[name, str(parameter.device)] for name, parameter in parameters if not parameter.is_cpu]
    gathered = all_gather_json(world, "devices of parameters", local[:1])
    for rank, elsewhere in enumerate(gathered):
        for name, device in elsewhere:
            raise PlanError(
                f"{requested[0]}: parameter {name!r} of rank {rank} is on {device}, and what travels by messages "
                "is read from CPU memory",
                remedy=_REMEDY_OF_SHARDS if shards else REMEDY,
            )

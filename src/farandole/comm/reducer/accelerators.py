"""What gradients on an accelerator can have, and what is refused there by name, on all ranks.

Codecs of packed numbers and the exact mean travel by collectives of the backend, by route ``flat``. What travels
by messages between processes is read from CPU memory and written into it: other codecs, sessions, shards of stages
1 and 2, parameter servers and switches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ..codecs.registry import runs_on_devices
from ..device.streams import streams_of
from ..world.store_sync import all_gather_json
from ..world.world import World

REMEDY = 'on an accelerator use codec "none", bf16, fp16, int8, int4 or sign, and route "auto" or "flat"'
_REMEDY_OF_SHARDS = "on an accelerator use zero = 3, or 0"
_REMEDY_OF_SESSIONS = 'on an accelerator use codec "none" and route "auto" or "flat"'
_ROUTES = ("server", "sharded_server")


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the device that `parameters` are on: another than the CPU where one of them is elsewhere."""
    return next((parameter.device for parameter in parameters if not parameter.is_cpu), torch.device("cpu"))


def refuse_messages(
    world: World,
    parameters: Sequence[tuple[str, torch.Tensor]],
    plan: Plan,
    *,
    codecs: Sequence[str],
    shards: bool = False,
    sessions: bool = False,
) -> None:
    """Raise `PlanError`, on every rank, when gradients would travel by messages from an accelerator's memory.

    `codecs`: those that are asked for; none when gradients are exact. `shards`: whether each rank gets a part of
    the sums alone. `sessions`: whether codecs exchange whole tensors outside of backward passes. To be called by
    all ranks.
    """
    devices = {str(parameter.device): name for name, parameter in reversed(parameters)}
    packed = [codec for codec in codecs if not sessions and _is_packed(codec)]
    requested = [f"zero = {plan.zero}"] if shards else []
    requested += [f"codec {codec!r}" for codec in codecs if codec not in packed]
    requested += [f"route {plan.route!r}"] if plan.route in _ROUTES else []
    requested += ["switches"] if plan.ranks_per_switch or plan.switch_of else []
    if not (requested or packed) or world.size == 1:
        return
    elsewhere = [[name, device] for device, name in devices.items() if not device.startswith("cpu")]
    unknown = [torch.device(device).type for _, device in elsewhere if streams_of(torch.device(device)) is None]
    gathered = all_gather_json(world, "devices of parameters", [elsewhere[:1], sorted(devices), unknown])
    for rank, (found, all_devices, without_streams) in enumerate(gathered):
        for name, device in found:
            where = f"parameter {name!r} of rank {rank} is on {device}"
            if requested or without_streams:
                what = (requested or [f"codec {codec!r}" for codec in packed])[0]
                remedy = _REMEDY_OF_SHARDS if shards else _REMEDY_OF_SESSIONS if sessions else REMEDY
                raise PlanError(
                    f"{what}: {where}, and what travels by messages is read from CPU memory", remedy=remedy
                )
            if len(all_devices) > 1:
                raise PlanError(
                    f"codec {packed[0]!r}: {where}, others are on "
                    f"{', '.join(other for other in all_devices if other != device)}",
                    remedy="move the whole model to one device, or use codec none",
                )


def _is_packed(codec: str) -> bool:
    spec = CodecSpec.parse(codec)
    return not (spec.is_auto or spec.is_own) and runs_on_devices(spec)

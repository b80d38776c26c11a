"""How a front end configures its reducer: when ranks connect, what the result is, what travels along.

And what gradients on an accelerator can have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...core.step_model import CANDIDATES
from ...core.vocabulary.codec_spec import AUTO, CodecSpec
from ...core.vocabulary.errors import CommError, PlanError
from ...core.vocabulary.spec import Plan
from ..codecs.registry import runs_on_devices
from ..device.streams import streams_of
from ..world.store_sync import all_gather_json
from ..world.world import World


class ExtraTensors(Protocol):
    """Something small that travels with every exchange, launched before the first bucket."""

    def prepare(self) -> bool:
        """Agree with all ranks on what will travel, and return whether anything will.

        Called once, in the first pass.
        """

    def pack(self, weight: float) -> torch.Tensor:
        """Return the tensor to sum over the ranks in place, of the same shape on all ranks in every exchange.

        `weight`: this rank's share of the samples.
        """

    def unpack(self) -> None:
        """Take the sum."""


def _unchanged(problem: CommError) -> Exception:
    return problem


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class ReducerOptions:
    """What differs between front ends; see `DEFAULT_OPTIONS`."""

    model: str = "this model"
    """What notices call it, such as the class of the model."""
    lazy_init: bool = False
    """Connect to the other ranks in the first exchange, not in the constructor."""
    before_connecting: Callable[[], None] = _nothing
    """Called before the first message to the other ranks."""
    reduce_op: Literal["mean", "sum"] = "mean"
    """What gradients become over the ranks."""
    is_compared: bool = False
    """Whether the parameters are known to be the same on all ranks."""
    include_frozen: bool = False
    """Exchange all parameters that required a gradient in the constructor, frozen since or not."""
    on_second_gradient: Callable[[str], Exception | None] | None = None
    """Makes the error for a parameter's second gradient between two calls of `begin_step`; None: it is fine."""
    mesh: DeviceMesh | None = None
    """All ranks, to which the rows of gradients are divided; None: every rank gets all of them."""
    map_error: Callable[[CommError], Exception] = _unchanged
    """What is raised in a backward pass for a failure of communication."""


DEFAULT_OPTIONS = ReducerOptions()
"""What `fd.distribute` needs."""


# What gradients on an accelerator can have, and what is refused there by name, on all ranks.
#
# Codecs whose messages have a size that the host knows, and the exact mean, travel by collectives of the backend,
# by route ``flat``. What travels by messages between processes is read from CPU memory and written into it: other
# codecs, sessions, and shards of stages 1 and 2.


REMEDY = 'on an accelerator use another codec than threshold and your own, and route "auto" or "flat"'
_REMEDY_OF_SHARDS = "on an accelerator use zero = 3, or 0"
_REMEDY_OF_SESSIONS = 'on an accelerator use codec "none" and route "auto" or "flat"'


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
    is_staged = plan.staging == "always" and not sessions and any(not each.is_cpu for _, each in parameters)
    codecs_there = [codec for codec in codecs if not sessions and _can_be_there(CodecSpec.parse(codec))]
    requested = [f"zero = {plan.zero}"] if shards else []
    requested += [f"codec {codec!r}" for codec in codecs if codec not in codecs_there]
    if not (requested or codecs_there or is_staged) or world.size == 1:
        return
    places = [_Devices(*each) for each in all_gather_json(world, "devices of parameters", _place_of(parameters))]
    for rank, place in enumerate(places):
        if not place.name:
            continue
        where = f"parameter {place.name!r} of rank {rank} is on {place.device}"
        if requested or not place.model:
            what = [*requested, *(f"codec {codec!r}" for codec in codecs_there), f"staging = {plan.staging!r}"][0]
            remedy = _REMEDY_OF_SHARDS if shards else _REMEDY_OF_SESSIONS if sessions else REMEDY
            raise PlanError(
                f"{what}: {where}, and what travels by messages is read from CPU memory", remedy=remedy
            )
        if place.others:
            what = f"codec {codecs_there[0]!r}" if codecs_there else f"staging = {plan.staging!r}"
            raise PlanError(
                f"{what}: {where}, others are on {', '.join(place.others)}",
                remedy='move the whole model to one device, or use codec "none" and no staging',
            )
    for codec in codecs_there:
        if codec != AUTO and CodecSpec.parse(codec).granularity == "matrix":
            _refuse_unlike_products(codec, places)


def refused_candidates(world: World, parameters: Sequence[tuple[str, torch.Tensor]], plan: Plan) -> list[str]:
    """Return what codec "auto" must not choose on these devices, the same on all ranks; to be called by all."""
    found = []
    for codec in CANDIDATES if plan.lossy else ():
        if CodecSpec.parse(codec).granularity == "matrix":
            try:
                refuse_messages(world, parameters, plan, codecs=[codec])
            except PlanError:
                found.append(codec)
    return found


def _can_be_there(spec: CodecSpec) -> bool:
    """Return whether a codec can be asked for on a device; "auto" chooses among those that can."""
    return spec.is_auto or runs_on_devices(spec)


class _Devices(NamedTuple):
    """Where the parameters of one rank are."""

    name: str
    """The first that is not on the CPU; empty: there is none."""
    device: str
    others: list[str]
    """Further devices."""
    model: str
    """What the device calls itself; empty where it has no streams."""
    has_exact_products: bool


def _place_of(parameters: Sequence[tuple[str, torch.Tensor]]) -> _Devices:
    device = device_of([parameter for _, parameter in parameters])
    name = next((name for name, parameter in parameters if not parameter.is_cpu), "")
    others = sorted({str(parameter.device) for _, parameter in parameters} - {str(device)})
    streams = streams_of(device)
    if streams is None:
        return _Devices(name, str(device), others, "", True)
    return _Devices(name, str(device), others, streams.model, _has_exact_products())


def _has_exact_products() -> bool:
    """Return whether products of float32 matrices keep float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch refuses to say, where the script has set it by `torch.backends`
        return bool(torch.backends.cuda.matmul.fp32_precision == "ieee")


def _refuse_unlike_products(codec: str, places: Sequence[_Devices]) -> None:
    """Raise `PlanError` where ranks would not compute the same bits of the same matrices, or lose some of them."""
    for rank, place in enumerate(places):
        if place.model != places[0].model:
            raise PlanError(
                f"codec {codec!r}: rank 0 has a {places[0].model or 'CPU'}, rank {rank} a {place.model or 'CPU'}, "
                "and their products of matrices differ in the last bits",
                remedy="use a codec that makes no products, such as int4, or equal devices",
            )
        if place.name and not place.has_exact_products:
            raise PlanError(
                f"codec {codec!r}: on rank {rank} products of float32 matrices are rounded to TF32 or less",
                remedy='torch.set_float32_matmul_precision("highest"), or a codec that makes no products',
            )

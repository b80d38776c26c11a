"""Makes a `StepProfile` by route of two profiled steps: facts of all ranks, times of the slowest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...core.step_model.prediction import CANDIDATES, CodecSpeed, Gradient, StepProfile, slowest_speed
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.spec import Plan
from ..codecs.eligibility import can_have, pattern_for
from ..routes.route import Route
from ..world.store_sync import all_gather_json
from ..world.world import World
from .probe import measure_codecs

Parameters = Sequence[tuple[str, torch.nn.Parameter]]
MeasureCodecs = Callable[[tuple[str, ...], int], dict[str, CodecSpeed]]
"""Takes names of codecs and the number of ranks."""


@dataclass(frozen=True)
class PassTimings:
    """One exchange as the reducer saw it. Times of `time.monotonic`."""

    forward_begin_seconds: float
    begin_seconds: float
    """Fraction of backward."""
    wait_begin_seconds: float
    wait_end_seconds: float
    ready_seconds: Sequence[float]
    """By parameter; 0 for one without a gradient."""


@dataclass(frozen=True)
class LocalTimes:
    """What this rank measured, in seconds."""

    forward: float
    backward: float
    ready: Sequence[float]
    """By parameter, after the beginning of backward; its end for one without a gradient."""
    intra_host: tuple[float, float]
    """To sum inside the host: for each byte, and for a very small bucket."""


def local_times(passes: Sequence[PassTimings], intra_host: tuple[float, float]) -> LocalTimes:
    """Return what this rank's last passes took at best; the moments of gradients are those of the last one."""
    last = passes[-1]
    backward = min(each.wait_begin_seconds - each.begin_seconds for each in passes)
    return LocalTimes(
        min(each.begin_seconds - each.forward_begin_seconds for each in passes),
        backward,
        [max(0.0, moment - last.begin_seconds) if moment else backward for moment in last.ready_seconds],
        intra_host,
    )


def gather_profiles(
    world: World,
    plan: Plan,
    routes: Mapping[str, Route],
    parameters: Parameters,
    times: LocalTimes,
    *,
    measure: MeasureCodecs = measure_codecs,
    on_device: bool = False,
) -> dict[str, StepProfile]:
    """Return the profile of a step by route, the same on all ranks. Called by all ranks.

    `measure`: what tells the cost of codecs. `on_device`: whether they compute on the accelerator of the backward
    pass, and one stream has them and their messages.
    """
    names = CANDIDATES if plan.lossy else CANDIDATES[:1]
    circles = {name: each.slices[0] if each.memory is None else each.across for name, each in routes.items()}
    speeds = {route: _speeds(names, circle.seat.size, measure) for route, circle in circles.items()}
    local = {
        "forward": times.forward,
        "backward": times.backward,
        "ready": [round(moment, 6) for moment in times.ready],
        "shares_core": on_device or len(os.sched_getaffinity(0)) <= torch.get_num_threads(),
        "speeds": {
            route: {name: (speed.seconds_per_byte, speed.seconds_per_bucket) for name, speed in measured.items()}
            for route, measured in speeds.items()
        },
        "intra_host": times.intra_host,
    }
    everyone = all_gather_json(world, "choosing codecs", local)
    ready = [max(each["ready"][i] for each in everyone) for i in range(len(parameters))]
    profiles = {}
    for route, lines in routes.items():
        shards = len(lines.everyone.ranks) // len(circles[route].ranks)
        gradients = [
            _gradient(name, parameter, moment, shards)
            for (name, parameter), moment in zip(parameters, ready, strict=True)
            if parameter.requires_grad and pattern_for(name, plan) is None
        ]
        profiles[route] = StepProfile(
            sorted(gradients, key=lambda gradient: gradient.ready_seconds),
            max(each["forward"] for each in everyone),
            max(each["backward"] for each in everyone),
            circles[route].seat.size,
            any(each["shares_core"] for each in everyone),
            {
                name: slowest_speed(speed, [each["speeds"][route][name] for each in everyone])
                for name, speed in speeds[route].items()
            },
            shards,
            max(each["intra_host"][0] for each in everyone) if shards > 1 else 0.0,
            max(each["intra_host"][1] for each in everyone) if shards > 1 else 0.0,
            is_serial=on_device,
        )
    return profiles


def _speeds(names: tuple[str, ...], size: int, measure: MeasureCodecs) -> dict[str, CodecSpeed]:
    """Return what codecs cost among `size` ranks; where a rank is alone nothing is sent, and no codec is used."""
    return {NONE: CodecSpeed(0.0, 1.0)} if size == 1 else measure(names, size)


def _gradient(name: str, parameter: torch.nn.Parameter, ready_seconds: float, shards: int) -> Gradient:
    rows = parameter.shape[0] if parameter.dim() else 1
    columns = parameter.numel() // max(1, rows)
    can_be_coded = can_have(parameter, CodecSpec.parse("int8"))
    low_rank = can_be_coded and shards == 1 and can_have(parameter, CodecSpec.parse(CANDIDATES[-1]))
    nbytes = parameter.numel() * parameter.element_size()
    return Gradient(name, nbytes, ready_seconds, rows, columns, can_be_coded, low_rank, str(parameter.dtype))

"""Makes a `StepProfile` by route of two profiled steps: facts of all ranks, times of the slowest.

[Note: learning] The model leaves things out, and leaves more out for some codecs than for others. So after a
choice the median of the measured steps over the raw prediction is kept for its main codec and route, and
multiplies what is predicted for them when ranks choose again. What was not used yet gets the mean of what is
known: else a codec would look bad only because it was tried. Only steps on a link that did not change meanwhile
teach anything: others measure the link.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...core.link import LinkModel
from ...core.step_model import CANDIDATES, CodecSpeed, Gradient, StepProfile, slowest_speed
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.spec import Plan
from ..codecs.registry import can_have, pattern_for
from ..routes import Route
from ..transport.transport import Transport
from ..world.store_sync import all_gather_json
from ..world.world import World
from .probe import measure_codecs, probe_bytes, probe_intra_host, probe_link

# What steps really took beside what the model of a step said, by codec; so that a second choice is a better one.

LEAST_STEPS = 5
"""Fewer teach nothing. One of five that took long, or two, do not move the median far."""
_WINDOW_STEPS = 50
_BOUNDS = (0.5, 2.0)
"""What is further off was not the model's fault."""
_SAME_LINK = 1.25
_KEPT_STEPS = 100
_SURPRISE = 1.5


@dataclass
class ChosenSteps:
    """The steps since a choice was made, beside what was predicted for them."""

    expected_seconds: float = float("inf")
    """Predicted and corrected by what was learned."""
    model_seconds: float = float("inf")
    """Predicted by the step model alone."""
    measured_seconds: list[float] = field(default_factory=list)
    """The first step after the choice, and the newest ones."""

    def add(self, seconds: float) -> None:
        """Take one more step."""
        self.measured_seconds.append(seconds)
        if len(self.measured_seconds) > 2 * _KEPT_STEPS:
            del self.measured_seconds[1:_KEPT_STEPS]

    @property
    def is_late(self) -> bool:
        """Whether the last two steps were surprisingly long."""
        return (
            len(self.measured_seconds) >= 2 and min(self.measured_seconds[-2:]) > _SURPRISE * self.expected_seconds
        )

    @property
    def ratio(self) -> float:
        """What these steps took over what the model predicted; see `ratio_of`."""
        return ratio_of(self.measured_seconds, self.model_seconds)


class Calibration:
    """Ratios of measured to predicted seconds. The same on all ranks, which feed it with the same numbers."""

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return whether anything is known."""
        return bool(self._ratios)

    def take(self, codec: str, ratio: float) -> None:
        """Store the ratio of measured to predicted step time with `codec`, replacing the previous one."""
        least, most = _BOUNDS
        self._ratios[codec] = min(most, max(least, ratio))

    def ratio(self, codec: str) -> float:
        """Return what to multiply a prediction for `codec` with."""
        if not self._ratios:
            return 1.0
        return self._ratios.get(codec) or statistics.fmean(self._ratios.values())


def ratio_of(measured_seconds: Sequence[float], predicted_seconds: float) -> float:
    """Return this rank's median step over the prediction; 0.0 for too few steps, which is so on all ranks."""
    if len(measured_seconds) < LEAST_STEPS:
        return 0.0
    # The first step after a switch makes buckets and states.
    return statistics.median(measured_seconds[1:][-_WINDOW_STEPS:]) / predicted_seconds


def is_same_link(before: LinkModel, now: LinkModel) -> bool:
    """Return whether two measurements may be of a link that did not change."""
    ratio = now.bytes_per_second / before.bytes_per_second
    return 1 / _SAME_LINK < ratio < _SAME_LINK


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


# What the keys of the exchange are chosen by: the profile of a step, and the links of its routes.
#
# Shared by `autotuner` and the online tuner of `train`, which asks for a `Look` between two steps.


_KEPT_PASSES = 5
_NO_LINK = LinkModel(float("inf"), 0.0)
"""That of a route which crosses none."""


@dataclass(frozen=True)
class Look:
    """A step without its exchange and the links, by route: the same on all ranks."""

    profiles: Mapping[str, StepProfile]
    links: Mapping[str, LinkModel]


class PassLog:
    """The newest exchanges of one reducer."""

    def __init__(self) -> None:
        self.passes: deque[PassTimings] = deque(maxlen=_KEPT_PASSES)

    def take(self, seen: PassTimings) -> None:
        """Take the last exchange into account."""
        self.passes.append(seen)

    @property
    def wait_seconds(self) -> float:
        """How long this rank waited at the ends of these backward passes: the median, 0.0 without a pass."""
        waits = [each.wait_end_seconds - each.wait_begin_seconds for each in self.passes]
        return statistics.median(waits) if waits else 0.0


def measure_links(transport: Transport, routes: Mapping[str, Route], gradient_bytes: int) -> dict[str, LinkModel]:
    """Return the link as each route uses it, the same on all ranks; called by all of them at once."""
    found = {}
    for route, lines in routes.items():
        # A short one says how long a good one is: what the link carried before it became slow takes too long.
        short = probe_link(transport, lines.circle, lines.everyone, probe_bytes(None, gradient_bytes))
        found[route] = probe_link(transport, lines.circle, lines.everyone, probe_bytes(short, gradient_bytes))
    return found


def look(
    world: World, plan: Plan, routes: Mapping[str, Route], parameters: Parameters, log: PassLog, *, lossy: bool
) -> Look:
    """Measure what is needed to predict steps by any of `routes`, which have one conductor with a transport.

    Called by all ranks between two steps. `lossy`: measure codecs, too.
    """
    first = next(iter(routes.values()))
    conductor = first.conductor
    assert conductor is not None, "the caller has connected it"
    memory = first.memory
    intra_host = (0.0, 0.0) if memory is None else conductor.run(lambda _: probe_intra_host(memory))
    crossing = {name: lines for name, lines in routes.items() if name != "shared"}
    gradient_bytes = sum(parameter.nbytes for _, parameter in parameters if parameter.requires_grad)
    links = conductor.run(lambda transport: measure_links(transport, crossing, gradient_bytes))
    profiles = gather_profiles(
        world, replace(plan, lossy=lossy), routes, parameters, local_times(list(log.passes), intra_host)
    )
    return Look(profiles, {**dict.fromkeys(set(routes) - set(crossing), _NO_LINK), **links})

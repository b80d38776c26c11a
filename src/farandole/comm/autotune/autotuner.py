"""The tuner: chooses codecs for an engine while it trains, and looks again when the link changes.

Two steps are profiled (when each gradient is ready, how long forward and backward take), then all ranks
compute the same choice from the same gathered numbers and switch between two steps.

[Note: looking again] The link is probed anew when any rank wishes it: its steps are half as long again as
predicted, or two hundred times the last look's duration has passed; see `pause` for how often at most. Wishes
travel with the presence flags of the first bucket, so all ranks probe after the same step; the probe's
numbers are the same on all ranks, so are the choice and the step of the switch. Nobody asks anybody.

[Note: routes] Where ranks could add up inside a host or behind a switch first, and the plan leaves the route
open, the link is measured as either route uses it, and so is what adding up inside takes; the step is predicted
for each. Both use the same connections. Where all ranks share the memory of one host no link is crossed, and
nothing is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.units import format_bits_per_second, format_seconds
from ..codecs.eligibility import can_have, pattern_for
from ..messages.message import Encoding, GroupRank, sum_by_parts
from ..messages.recursive_doubling import sum_by_doubling
from ..routes.route import TRIED_CONNECTIONS, Route
from ..transport.comm_thread import CommThread
from ..transport.transport import Transport
from ..world.store_sync import all_gather_json
from ..world.world import World
from .calibration import Calibration, is_same_link, ratio_of
from .pause import Pause
from .probe import (
    choose_lanes,
    largest_of_all,
    measure_codecs,
    probe_bytes,
    probe_inside,
    probe_link,
    probe_seconds,
)
from .step_model import CANDIDATES, CodecChoice, Gradient, LinkModel, StepProfile, choose, predict, sum_seconds

PROFILED_STEPS = 2
_KEPT_STEPS = 100
_WORTH_SWITCHING = 0.95
_SURPRISE = 1.5


@dataclass(frozen=True)
class PassTimings:
    """One exchange as the engine saw it. Times of `time.monotonic`."""

    forward_begin_seconds: float
    begin_seconds: float
    """Of backward."""
    wait_begin_seconds: float
    wait_end_seconds: float
    ready_seconds: Sequence[float]
    """By parameter; 0 for one without a gradient."""


class Autotuner:
    """Chooses for one engine. Made by all ranks alike."""

    def __init__(
        self, world: World, plan: Plan, lines: Route, parameters: Sequence[tuple[str, torch.nn.Parameter]]
    ) -> None:
        self._world, self._plan = world, plan
        self._ways: dict[str, Route] = {lines.route: lines}
        if lines.route == "hierarchical" and plan.route == "auto":
            self._ways["flat"] = lines.without_memory("codec auto predicts shorter steps")
        self._own_route = lines.route
        self._parameters = parameters
        self._passes: list[PassTimings] = []
        self._situations: dict[str, StepProfile] = {}
        self._links: dict[str, LinkModel] = {}
        self._learned = Calibration()
        self.pause = Pause()
        """Until the next look."""
        self._measured: list[float] = []
        self._expected_seconds = self._raw_seconds = float("inf")
        self._has_told = False
        self.choice: CodecChoice | None = None
        self.history: list[tuple[LinkModel, CodecChoice]] = []
        """Every choice made, with the link it was made for."""

    def close(self) -> None:
        """Let go of the lines: nothing is chosen any more. What was chosen can still be read."""
        self._ways = {}

    @property
    def _first(self) -> Route:
        return self._ways[self._own_route]

    @property
    def _conductor(self) -> CommThread:
        assert self._first.conductor is not None, "auto has a conductor"
        return self._first.conductor

    @property
    def lines(self) -> Route:
        """The route that was chosen last; before, the one that the world has."""
        return self._first if self.choice is None else self._ways[self.choice.route]

    @property
    def wishes_probe(self) -> bool:
        """Whether this rank wants the link measured after the coming exchange."""
        return self.pause.is_over(time.monotonic(), late=self._is_late)

    @property
    def _is_late(self) -> bool:
        """Whether the last two steps were surprisingly long."""
        return len(self._measured) >= 2 and min(self._measured[-2:]) > _SURPRISE * self._expected_seconds

    def after_exchange(self, seen: PassTimings, *, somebody_wishes: bool) -> CodecChoice | None:
        """Take the last exchange into account; return what to switch to, or None. Called by all ranks."""
        if not self._situations:
            self._passes.append(seen)
            if len(self._passes) <= PROFILED_STEPS:
                return None
            self._situations = self._gather_situations()
            return self._look()
        self._measured.append(seen.wait_end_seconds - seen.forward_begin_seconds)
        if len(self._measured) > 2 * _KEPT_STEPS:
            del self._measured[1:_KEPT_STEPS]
        if len(self._measured) == 3 and self._world.rank == 0 and self.choice is not None and not self._has_told:
            self._has_told = True  # once a choice, however often the link is measured
            write_notice(
                f"codec auto: predicted {format_seconds(self.choice.seconds)} a step, "
                f"measured {format_seconds(min(self._measured))}"
            )
        return self._look() if somebody_wishes else None

    # -- looking and choosing --------------------------------------------------------------------

    def _look(self) -> CodecChoice | None:
        """Measure the link; return what is better for it than what there is."""
        before, late, began = self._links, self._is_late, time.monotonic()
        self._links = self._conductor.run(self._measure)
        self._learn(before)
        found = self._judge()
        other_link = any(not is_same_link(before[route], link) for route, link in self._links.items() if before)
        again = sum(
            probe_seconds(self._links[route], lines.circle.seat.size) for route, lines in self._ways.items()
        )
        self.pause.looked(began, time.monotonic(), again, changed=other_link or found is not None, late=late)
        return found

    def _judge(self) -> CodecChoice | None:
        """Return what to switch to for the links as they are now; None: nothing that is worth it."""
        best, current = self._choose(), self.choice
        if current is not None:
            now = self._predict(current) * self._learned.ratio(_learned_as(current.route, current.main_codec))
            if best.seconds > _WORTH_SWITCHING * now:
                self._expect(replace(current, seconds=now))
                return None
        self._expect(best)
        self._has_told = False
        self.history.append((self._links[best.route], best))
        if self._world.rank == 0:
            write_notice(self._explain(best))
        return best

    def _measure(self, transport: Transport) -> dict[str, LinkModel]:
        """Return the links by route; the first time, choose how many connections to use as well."""
        found = {}
        for route, lines in self._ways.items():
            # A short one says how long a good one is: what the link carried before it became slow takes too long.
            short = probe_link(transport, lines.circle, lines.everyone, probe_bytes(None))
            found[route] = probe_link(transport, lines.circle, lines.everyone, probe_bytes(short))
        if not self._links and self._plan.connections == 1:
            circles, link = (self._first.circle, self._first.everyone), found[self._first.route]
            transport.used_lanes = choose_lanes(transport, *circles, probe_bytes(link), TRIED_CONNECTIONS)
        return found

    def _choose(self) -> CodecChoice:
        """Return the best choice of all routes; the world's own where they are equal."""
        choices = []
        for route, situation in self._situations.items():
            correct = partial(self._ratio, route)
            choice = choose(situation, self._links[route], lossy=self._plan.lossy, correct=correct)
            choices.append(replace(choice, route=route))
        return min(choices, key=lambda choice: choice.seconds)

    def _ratio(self, route: str, codec: str) -> float:
        return self._learned.ratio(_learned_as(route, codec))

    def _learn(self, before: Mapping[str, LinkModel]) -> None:
        """See [Note: learning]: take the slowest rank's ratio of the steps since the last look."""
        choice = self.choice
        if choice is None:
            return
        mine = ratio_of(self._measured, self._raw_seconds)
        everyone = self._first.everyone
        (ratio,) = self._conductor.run(lambda transport: largest_of_all(transport, everyone, [mine]))
        if ratio and is_same_link(before[choice.route], self._links[choice.route]):
            self._learned.take(_learned_as(choice.route, choice.main_codec), ratio)

    def _predict(self, choice: CodecChoice) -> float:
        """Return what the model alone predicts for the links as they are now."""
        situation, link = self._situations[choice.route], self._links[choice.route]
        return predict(situation, link, choice.codecs, choice.bucket_bytes)

    def _expect(self, choice: CodecChoice) -> None:
        self.choice = choice
        self._expected_seconds, self._raw_seconds = choice.seconds, self._predict(choice)
        self._measured = []
        link, lines = self._links[choice.route], self._ways[choice.route]
        assert lines.conductor is not None, "auto has a conductor"
        lines.conductor.sum_by = partial(_cheapest_sum, link, lines.circle.seat.size)

    def _explain(self, best: CodecChoice) -> str:
        link = self._links[best.route]
        plain = predict(self._situations[best.route], link, {}, best.bucket_bytes)
        coded = [codec for codec in best.codecs.values() if codec != "none"]
        what = f"{best.main_codec} for {len(coded)} of {len(best.codecs)} parameters" if coded else "none"
        why = f"predicted {format_seconds(best.seconds)} a step, uncompressed {format_seconds(plain)}"
        if self._learned:
            ratio = self._ratio(best.route, best.main_codec)
            why += f" ({ratio:.0%} of what the model says, as steps before took)"
        for route in self._ways:
            if route != best.route:
                situation = self._situations[route]
                other = choose(
                    situation, self._links[route], lossy=self._plan.lossy, correct=partial(self._ratio, route)
                )
                why += f"; route {best.route}, by {route} {format_seconds(other.seconds)}"
        if not self._plan.lossy:
            why += "; lossy codecs are not allowed (plan key lossy)"
        rate = format_bits_per_second(8 * link.bytes_per_second)
        lanes = self._conductor.transport.used_lanes
        return (
            f"codec auto: {what}, buckets of {best.bucket_bytes >> 20} MiB: {why}; "
            f"link {rate} a rank, {format_seconds(link.latency_seconds)} a round, "
            f"{lanes} connection{'s' if lanes > 1 else ''}"
        )

    def _gather_situations(self) -> dict[str, StepProfile]:
        """Return what all ranks know together, by route: the slowest rank's times."""
        passes = self._passes[1:]  # the first one built the buckets
        forward = min(each.begin_seconds - each.forward_begin_seconds for each in passes)
        backward = min(each.wait_begin_seconds - each.begin_seconds for each in passes)
        last = passes[-1]
        ready = [max(0.0, moment - last.begin_seconds) if moment else backward for moment in last.ready_seconds]
        names = CANDIDATES if self._plan.lossy else CANDIDATES[:1]
        speeds = {route: measure_codecs(names, lines.circle.seat.size) for route, lines in self._ways.items()}
        cores = len(os.sched_getaffinity(0))
        memory = self._first.memory
        mine = {
            "forward": forward,
            "backward": backward,
            "ready": [round(moment, 6) for moment in ready],
            "shares_core": cores <= torch.get_num_threads(),
            "speeds": {
                route: {name: speed.seconds_per_byte for name, speed in measured.items()}
                for route, measured in speeds.items()
            },
            "inside": (0.0, 0.0) if memory is None else self._conductor.run(lambda _: probe_inside(memory)),
        }
        said = all_gather_json(self._world, "choosing codecs", mine)
        together = [max(other["ready"][i] for other in said) for i in range(len(self._parameters))]
        found = {}
        for route, lines in self._ways.items():
            slices = len(lines.everyone.ranks) // len(lines.circle.ranks)
            gradients = [
                self._gradient(name, parameter, moment, slices)
                for (name, parameter), moment in zip(self._parameters, together, strict=True)
                if parameter.requires_grad and pattern_for(name, self._plan) is None
            ]
            found[route] = StepProfile(
                sorted(gradients, key=lambda gradient: gradient.ready_seconds),
                max(other["forward"] for other in said),
                max(other["backward"] for other in said),
                lines.circle.seat.size,
                any(other["shares_core"] for other in said),
                {
                    name: replace(speed, seconds_per_byte=max(other["speeds"][route][name] for other in said))
                    for name, speed in speeds[route].items()
                },
                slices,
                max(other["inside"][0] for other in said) if slices > 1 else 0.0,
                max(other["inside"][1] for other in said) if slices > 1 else 0.0,
            )
        return found

    def _gradient(self, name: str, parameter: torch.nn.Parameter, moment: float, slices: int) -> Gradient:
        rows = parameter.shape[0] if parameter.dim() else 1
        columns = parameter.numel() // max(1, rows)
        codable = can_have(parameter, CodecSpec.parse("int8"))
        low_rank = codable and slices == 1 and can_have(parameter, CodecSpec.parse("powersgd:4"))
        nbytes = parameter.numel() * parameter.element_size()
        return Gradient(name, nbytes, moment, rows, columns, codable, low_rank)


def _learned_as(route: str, codec: str) -> str:
    return f"{codec} by {route}"


def _cheapest_sum(link: LinkModel, measured_size: int, tensor: torch.Tensor, seat: GroupRank) -> Encoding:
    """Sum as is fastest by the link, which was measured among `measured_size` ranks: the same choice on all."""
    if seat.size == measured_size:
        seconds = sum_seconds(link, seat.size, tensor.nbytes)
        if seconds["doubling"] < min(seconds["direct"], seconds["parts"]):
            return sum_by_doubling(tensor, seat)
    return sum_by_parts(tensor, seat)

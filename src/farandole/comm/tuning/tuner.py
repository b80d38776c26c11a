"""The tuner: chooses codecs for an engine while it trains, and looks again when the link changes.

Two steps are profiled (when each gradient is ready, how long forward and backward take), then all ranks
compute the same choice from the same gathered numbers and switch between two steps.

[Note: looking again] The link is probed anew when any rank wishes it: its wait was half as long again as
predicted, or a hundred times the next probe's duration has passed (so probing costs about 1 %). Wishes
travel with the presence flags of the first bucket, so all ranks probe after the same step; the probe's
numbers are the same on all ranks, so are the choice and the step of the switch. Nobody asks anybody.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...core.codec_spec import CodecSpec
from ...core.spec import Plan
from ...core.units import format_bits_per_second, format_seconds
from ..agree import gather
from ..codec_choice import can_have, pattern_for
from ..codecs.doubling import sum_by_doubling
from ..codecs.message import Encoding, Seat, sum_by_parts
from ..lines import TRIED_CONNECTIONS, Lines
from ..world import World
from .model import GENTLENESS, Choice, Gradient, Link, Situation, choose, predict, sum_seconds
from .probe import choose_lanes, measure_codecs, probe_bytes, probe_link, probe_seconds

PROFILED_STEPS = 2
_PROBE_SHARE = 0.01
_LEAST_PAUSE_SECONDS = 5.0
_WORTH_SWITCHING = 0.95
_SURPRISE = 1.5


@dataclass(frozen=True)
class Pass:
    """One exchange as the engine saw it. Times of `time.monotonic`."""

    forward_begin_seconds: float
    begin_seconds: float
    """Of backward."""
    wait_begin_seconds: float
    wait_end_seconds: float
    ready_seconds: Sequence[float]
    """By parameter; 0 for one without a gradient."""


class Tuner:
    """Chooses for one engine. Made by all ranks alike."""

    def __init__(
        self, world: World, plan: Plan, lines: Lines, parameters: Sequence[tuple[str, torch.nn.Parameter]]
    ) -> None:
        self._world, self._plan, self._lines = world, plan, lines
        self._parameters = parameters
        self._passes: list[Pass] = []
        self._situation: Situation | None = None
        self._link: Link | None = None
        self._next_probe = float("inf")
        self._measured: list[float] = []
        self._expected_seconds = float("inf")
        self.choice: Choice | None = None
        self.history: list[tuple[Link, Choice]] = []
        """Every choice made, with the link it was made for."""

    @property
    def wishes_probe(self) -> bool:
        """Whether this rank wants the link measured after the coming exchange."""
        late = bool(self._measured) and min(self._measured[-2:]) > _SURPRISE * self._expected_seconds
        return time.monotonic() > self._next_probe or (late and len(self._measured) >= 2)

    def after_exchange(self, seen: Pass, *, somebody_wishes: bool) -> Choice | None:
        """Take the last exchange into account; return what to switch to, or None. Called by all ranks."""
        if self._situation is None:
            self._passes.append(seen)
            if len(self._passes) <= PROFILED_STEPS:
                return None
            self._situation = self._gather_situation()
            return self._look()
        self._measured.append(seen.wait_end_seconds - seen.forward_begin_seconds)
        if len(self._measured) == 3 and self._world.rank == 0 and self.choice is not None:
            _say(
                f"codec auto: predicted {format_seconds(self.choice.seconds)} a step, "
                f"measured {format_seconds(min(self._measured))}"
            )
        return self._look() if somebody_wishes else None

    # -- looking and choosing --------------------------------------------------------------------

    def _look(self) -> Choice | None:
        """Measure the link; return what is better for it than what there is."""
        assert self._situation is not None, "profiled before choosing"
        assert self._lines.conductor is not None, "auto has a conductor"
        transport = self._lines.conductor.transport
        circles = self._lines.circle, self._lines.everyone
        link = probe_link(transport, *circles, probe_bytes(self._link))
        if self._link is None:  # the first one was short: now we know how long a good one is
            link = probe_link(transport, *circles, probe_bytes(link))
            if self._plan.connections == 1:
                most = TRIED_CONNECTIONS
                transport.used_lanes = choose_lanes(transport, *circles, probe_bytes(link), most)
        self._link = link
        self._lines.conductor.sum_by = partial(_cheapest_sum, link, self._lines.circle.seat.size)
        best = choose(self._situation, link, lossy=self._plan.lossy)
        # Not this probe's own time: one of as many bytes as the link carried before it became slow takes long.
        again_seconds = probe_seconds(link, self._lines.circle.seat.size)
        self._next_probe = time.monotonic() + max(_LEAST_PAUSE_SECONDS, again_seconds / _PROBE_SHARE)
        current = self.choice
        if current is not None:
            now = predict(self._situation, link, current.codecs, current.bucket_bytes)
            if best.seconds > _WORTH_SWITCHING * now:
                self.choice = replace(current, seconds=now)
                self._expect()
                return None
        self.choice = best
        self._expect()
        self.history.append((link, best))
        if self._world.rank == 0:
            _say(self._explain(link, best))
        return best

    def _expect(self) -> None:
        assert self.choice is not None, "something was chosen"
        self._expected_seconds = self.choice.seconds
        self._measured = []

    def _explain(self, link: Link, best: Choice) -> str:
        assert self._situation is not None, "profiled before choosing"
        plain = predict(self._situation, link, {}, best.bucket_bytes)
        coded = [codec for codec in best.codecs.values() if codec != "none"]
        what = f"{best.main_codec} for {len(coded)} of {len(best.codecs)} parameters" if coded else "none"
        why = f"predicted {format_seconds(best.seconds)} a step, uncompressed {format_seconds(plain)}"
        if not self._plan.lossy:
            why += "; lossy codecs are not allowed (plan key lossy)"
        rate = format_bits_per_second(8 * link.bytes_per_second)
        return (
            f"codec auto: {what}, buckets of {best.bucket_bytes >> 20} MiB: {why}; "
            f"link {rate} a rank, {format_seconds(link.latency_seconds)} a round"
        )

    def _gather_situation(self) -> Situation:
        """Return what all ranks know together: the slowest rank's times."""
        passes = self._passes[1:]  # the first one built the buckets
        forward = min(each.begin_seconds - each.forward_begin_seconds for each in passes)
        backward = min(each.wait_begin_seconds - each.begin_seconds for each in passes)
        last = passes[-1]
        ready = [max(0.0, moment - last.begin_seconds) if moment else backward for moment in last.ready_seconds]
        names = GENTLENESS if self._plan.lossy else GENTLENESS[:1]
        circle = self._lines.circle
        speeds = measure_codecs(names, circle.seat.size)
        cores = len(os.sched_getaffinity(0))
        mine = {
            "forward": forward,
            "backward": backward,
            "ready": [round(moment, 6) for moment in ready],
            "shares_core": cores <= torch.get_num_threads(),
            "speeds": {name: speed.seconds_per_byte for name, speed in speeds.items()},
        }
        said = gather(self._world, "choosing codecs", mine)
        slowest = {
            name: replace(speed, seconds_per_byte=max(other["speeds"][name] for other in said), ratio=speed.ratio)
            for name, speed in speeds.items()
        }
        together = [max(other["ready"][i] for other in said) for i in range(len(self._parameters))]
        local = len(self._lines.everyone.ranks) // len(circle.ranks)
        gradients = [
            self._gradient(name, parameter, moment, local)
            for (name, parameter), moment in zip(self._parameters, together, strict=True)
            if parameter.requires_grad and pattern_for(name, self._plan) is None
        ]
        return Situation(
            sorted(gradients, key=lambda gradient: gradient.ready_seconds),
            max(other["forward"] for other in said),
            max(other["backward"] for other in said),
            circle.seat.size,
            any(other["shares_core"] for other in said),
            slowest,
        )

    def _gradient(self, name: str, parameter: torch.nn.Parameter, moment: float, local: int) -> Gradient:
        rows = parameter.shape[0] if parameter.dim() else 1
        columns = parameter.numel() // max(1, rows)
        codable = can_have(parameter, CodecSpec.parse("int8"))
        low_rank = codable and local == 1 and can_have(parameter, CodecSpec.parse("powersgd:4"))
        nbytes = parameter.numel() * parameter.element_size() // local
        return Gradient(name, nbytes, moment, rows, columns, codable, low_rank)


def _cheapest_sum(link: Link, measured_size: int, tensor: torch.Tensor, seat: Seat) -> Encoding:
    """Sum as is fastest by the link, which was measured among `measured_size` ranks: the same choice on all."""
    if seat.size == measured_size:
        seconds = sum_seconds(link, seat.size, tensor.nbytes)
        if seconds["doubling"] < min(seconds["direct"], seconds["parts"]):
            return sum_by_doubling(tensor, seat)
    return sum_by_parts(tensor, seat)


def _say(line: str) -> None:
    sys.stderr.write(f"farandole: {line}\n")
    sys.stderr.flush()

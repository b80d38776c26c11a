"""The autotuner: chooses codecs for a reducer while it trains, and probes the link again when it changes.

Two steps are profiled (when each gradient is ready, how long forward and backward take), then all ranks
compute the same choice from the same gathered numbers and switch between two steps.

[Note: probing again] The link is probed again when any rank requests it: its steps are half as long again as
predicted, or two hundred times the last probe's duration has passed; see `pause` for how often at most. Requests
travel with the used masks of encoded buckets, so all ranks probe after the same step; the probe's
numbers are the same on all ranks, so are the choice and the step of the switch. No message is needed for it.

[Note: routes] Where ranks can sum inside a host first, and the plan leaves the route open, the
link is measured as each route uses it, and so is the sum inside the host; the step is predicted for each. Both use
the same connections. Where all ranks share the memory of one host no link is crossed, and nothing is measured.

Looking costs every rank's time. So what all looks but the first took together, with the coming one, stays below
`SHARE` of the time since the first; there is a least pause between two; and looks that change nothing become
rarer: steps may be late because the model of a step is wrong, and then no look helps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...core.bucket_plan import BucketPlan
from ...core.env import is_verbose
from ...core.link import LinkModel, sum_seconds
from ...core.step_model import (
    CANDIDATES,
    LocalPrediction,
    StepProfile,
    buckets_of,
    predict_local_steps,
    predict_step,
)
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_bits_per_second, format_seconds
from ..messages import GroupRank, Reduction, recursive_doubling, reduce_scatter_all_gather
from ..routes import TRIED_CONNECTIONS, Route
from ..transport.comm_thread import CommThread
from ..transport.transport import Transport
from ..world.world import World
from .probe import (
    ProbeRequest,
    choose_connection_count,
    largest_of_all,
    probe_bytes,
    probe_intra_host,
    probe_seconds,
)
from .profile import (
    Calibration,
    ChosenSteps,
    PassTimings,
    gather_profiles,
    is_same_link,
    local_times,
    measure_links,
)

# When a link may be measured again: as soon as steps are late, and never for more than 1 % of the run's time.
SHARE = 0.01
"""Fraction of the time since the first measurement that all later ones may take."""
LEAST_PAUSE_SECONDS = 5.0
_REGULAR_SHARE = 0.005
"""Fraction for measurements without a reason; the rest is for steps that are late."""
_MOST_DOUBLINGS = 3
_MOST_LATE_DOUBLINGS = 6


class Pause:
    """One rank's idea of when to look again. Times of `time.monotonic`."""

    def __init__(self) -> None:
        self.next_seconds = float("inf")
        """When the next look is due without a reason."""
        self.spent_seconds = 0.0
        """For all looks but the first."""
        self._begin_seconds = float("inf")
        self._cost_seconds = 0.0
        self._late_from_seconds = float("inf")
        self._idle = self._late_idle = 0

    def is_over(self, now_seconds: float, *, late: bool) -> bool:
        """Return whether to look now; `late`: steps take longer than they should."""
        if now_seconds > self.next_seconds:
            return True
        return late and now_seconds >= max(self._late_from_seconds, self._affordable_seconds())

    def looked(
        self, began_seconds: float, ended_seconds: float, again_seconds: float, *, changed: bool, late: bool
    ) -> None:
        """Note a look, and how long the next one should take.

        `changed`: it found something new. `late`: steps were, on this rank, before it.
        """
        self._cost_seconds = again_seconds  # not this look's: the first does more, and a link may have changed
        if self._begin_seconds == float("inf"):
            self._begin_seconds = ended_seconds
        else:
            self.spent_seconds += ended_seconds - began_seconds
        self._idle = 0 if changed else min(self._idle + 1, _MOST_DOUBLINGS)
        self._late_idle = min(self._late_idle + 1, _MOST_LATE_DOUBLINGS) if late and not changed else 0
        regular = max(LEAST_PAUSE_SECONDS, self._cost_seconds / _REGULAR_SHARE) * 2**self._idle
        self.next_seconds = max(ended_seconds + regular, self._affordable_seconds())
        self._late_from_seconds = ended_seconds + LEAST_PAUSE_SECONDS * 2**self._late_idle

    def _affordable_seconds(self) -> float:
        """Return from when on one more look like the last keeps all of them below `SHARE`."""
        return self._begin_seconds + (self.spent_seconds + self._cost_seconds) / SHARE


PROFILED_STEPS = 2
_WORTH_SWITCHING = 0.95


class Autotuner:
    """Chooses for one reducer. Made by all ranks alike."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        lines: Route,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        request: ProbeRequest,
        *,
        model: str = "this model",
    ) -> None:
        """`request` travels with the exchanges that this learns of by `after_exchange`. Notices name `model`."""
        self._world, self._plan, self._model = world, plan, model
        self._request = request
        self._routes: dict[str, Route] = {lines.route: lines}
        if lines.route == "hierarchical" and plan.route == "auto":
            self._routes["flat"] = lines.without_memory("codec auto predicts shorter steps")
        self._parameters = parameters
        self._passes: list[PassTimings] = []
        self._profiles: dict[str, StepProfile] = {}
        self._links: dict[str, LinkModel] = {}
        self._calibration = Calibration()
        self.pause = Pause()
        """Until the next look."""
        self._steps = ChosenSteps()
        self._has_reported = False
        self.choice: CodecChoice | None = None
        self.history: list[tuple[LinkModel, CodecChoice]] = []
        """Every choice made, with the link it was made for."""

    def close(self) -> None:
        """Drop the routes: nothing is chosen any more. What was chosen can still be read."""
        self._routes = {}

    @property
    def _first(self) -> Route:
        return next(iter(self._routes.values()))

    @property
    def _speaks(self) -> bool:
        """Whether details are for the terminal, too."""
        return self._world.rank == 0 and is_verbose()

    @property
    def _gradient_bytes(self) -> int:
        return sum(parameter.nbytes for _, parameter in self._parameters if parameter.requires_grad)

    @property
    def _conductor(self) -> CommThread:
        assert self._first.conductor is not None, "auto has a conductor"
        return self._first.conductor

    @property
    def lines(self) -> Route:
        """The route that was chosen last; before, the one that the world has."""
        return self._first if self.choice is None else self._routes[self.choice.route]

    def after_exchange(self, seen: PassTimings) -> CodecChoice | None:
        """Take the last exchange into account; return what to switch to, or None. Called by all ranks."""
        choice = self._after(seen, requested=self._request.take())
        self._request.by_this_rank = self.pause.is_over(time.monotonic(), late=self._steps.is_late)
        return choice

    def _after(self, seen: PassTimings, *, requested: bool) -> CodecChoice | None:
        if not self._profiles:
            self._passes.append(seen)
            if len(self._passes) <= PROFILED_STEPS:
                return None
            self._profiles = self._gather_profiles()
            return self._probe_and_choose()
        self._steps.add(seen.wait_end_seconds - seen.forward_begin_seconds)
        measured = self._steps.measured_seconds
        if len(measured) == 3 and self._speaks and self.choice is not None and not self._has_reported:
            self._has_reported = True  # once a choice, however often the link is measured
            write_notice(
                f"codec auto, {self._model}: predicted {format_seconds(self.choice.seconds)} a step, "
                f"measured {format_seconds(min(measured))}"
            )
        return self._probe_and_choose() if requested else None

    def predict_local_steps(self, codec: str, other_seconds: float) -> LocalPrediction | None:
        """Return what steps would take of ranks that train on their own, with `codec` for what they changed.

        The same on all ranks. None before the link was measured, and where the codec's speed was not.
        `other_seconds`: of a step, beside forward, backward and the exchange.
        """
        route = "flat" if "flat" in self._links else next(iter(self._links), "")
        if not route or codec not in self._profiles[route].speeds:
            return None
        profile, link = self._profiles[route], self._links[route]
        return predict_local_steps(profile, link, codec, other_seconds=other_seconds)

    # -- looking and choosing --------------------------------------------------------------------

    def _probe_and_choose(self) -> CodecChoice | None:
        """Measure the link; return what is better for it than what there is."""
        before, late, began = self._links, self._steps.is_late, time.monotonic()
        self._links = self._find_links()
        self._learn(before)
        found = self._judge()
        other_link = any(not is_same_link(before[route], link) for route, link in self._links.items() if before)
        again = sum(
            probe_seconds(self._links[route], lines.circle.seat.size, self._gradient_bytes)
            for route, lines in self._routes.items()
        )
        self.pause.looked(began, time.monotonic(), again, changed=other_link or found is not None, late=late)
        return found

    def _judge(self) -> CodecChoice | None:
        """Return what to switch to for the links as they are now; None: nothing that is worth it."""
        best, current = self._choose(), self.choice
        if current is not None:
            now = self._predict(current) * self._ratio(current.route, current.main_codec)
            if best.seconds > _WORTH_SWITCHING * now:
                self._expect(replace(current, seconds=now))
                return None
        before = None if current is None else current.main_codec
        self._expect(best)
        self._has_reported = False
        self.history.append((self._links[best.route], best))
        if self._world.rank == 0 and (self._speaks or best.main_codec != before):
            write_notice(self._explain(best) if is_verbose() else self._summarise(best))
        return best

    def _find_links(self) -> dict[str, LinkModel]:
        """Return the links by route, the same on all ranks; called by all of them at once."""
        return self._conductor.run(self._measure)

    def _measure(self, transport: Transport) -> dict[str, LinkModel]:
        """Return the links by route; the first time, choose how many connections to use as well."""
        most = self._gradient_bytes
        found = measure_links(transport, self._routes, most)
        if not self._links and self._plan.connections == 1:
            circles, link = (self._first.circle, self._first.everyone), found[self._first.route]
            transport.used_lanes = choose_connection_count(
                transport, *circles, probe_bytes(link, most), TRIED_CONNECTIONS
            )
        return found

    def _choose(self) -> CodecChoice:
        """Return the best choice of all routes; the world's own where they are equal."""
        return min((self._choose_by(route) for route in self._profiles), key=lambda choice: choice.seconds)

    def _choose_by(self, route: str) -> CodecChoice:
        choice = choose(
            self._profiles[route],
            self._links[route],
            lossy=self._plan.lossy,
            first_bucket_bytes=self._plan.first_bucket_bytes,
            correct=partial(self._ratio, route),
        )
        return replace(choice, route=route)

    def _ratio(self, route: str, codec: str) -> float:
        return self._calibration.ratio(_calibration_key(route, codec))

    def _learn(self, before: Mapping[str, LinkModel]) -> None:
        """See [Note: learning]: take the slowest rank's ratio of the steps since the last look."""
        choice = self.choice
        if choice is None:
            return
        mine = self._steps.ratio
        everyone = self._first.everyone
        (ratio,) = self._conductor.run(lambda transport: largest_of_all(transport, everyone, [mine]))
        if ratio and is_same_link(before[choice.route], self._links[choice.route]):
            self._calibration.take(_calibration_key(choice.route, choice.main_codec), ratio)

    def _predict(self, choice: CodecChoice) -> float:
        """Return what the model alone predicts for the links as they are now."""
        profile, link = self._profiles[choice.route], self._links[choice.route]
        return predict_step(profile, link, choice.plan).seconds

    def _expect(self, choice: CodecChoice) -> None:
        self.choice = choice
        self._steps = ChosenSteps(choice.seconds, self._predict(choice))
        self._sum_by_link(choice)

    def _sum_by_link(self, choice: CodecChoice) -> None:
        link, lines = self._links[choice.route], self._routes[choice.route]
        self._conductor.transport.sum_by = partial(_cheapest_sum, link, lines.circle.seat.size)

    def _summarise(self, best: CodecChoice) -> str:
        why = f"predicted {format_seconds(best.seconds)} a step"
        if best.main_codec != NONE:
            why += f", uncompressed {format_seconds(self._uncompressed_seconds(best))}"
        elif not self._plan.lossy:
            why += "; lossy codecs need the plan key lossy"
        return f"codec auto, {self._model}: {_what(best)} ({why})"

    def _uncompressed_seconds(self, best: CodecChoice) -> float:
        uncompressed = replace(best.plan, codecs={})
        return predict_step(self._profiles[best.route], self._links[best.route], uncompressed).seconds

    def _explain(self, best: CodecChoice) -> str:
        link = self._links[best.route]
        plain = self._uncompressed_seconds(best)
        why = f"predicted {format_seconds(best.seconds)} a step, uncompressed {format_seconds(plain)}"
        if self._calibration:
            ratio = self._ratio(best.route, best.main_codec)
            why += f" ({ratio:.0%} of what the model says, as steps before took)"
        for route in self._routes:
            if route != best.route:
                other = self._choose_by(route)
                why += f"; route {best.route}, by {route} {format_seconds(other.seconds)}"
        if not self._plan.lossy:
            why += "; lossy codecs are not allowed (plan key lossy)"
        rate = format_bits_per_second(8 * link.bytes_per_second)
        return (
            f"codec auto, {self._model}: {_what(best)}, buckets of {best.bucket_bytes >> 20} MiB: {why}; "
            f"link {rate} a rank, {format_seconds(link.latency_seconds)} a round{self._connections()}"
        )

    def _connections(self) -> str:
        lanes = self._conductor.transport.used_lanes
        return f", {lanes} connection{'s' if lanes > 1 else ''}"

    def _gather_profiles(self) -> dict[str, StepProfile]:
        memory = self._first.memory
        intra_host = (0.0, 0.0) if memory is None else self._conductor.run(lambda _: probe_intra_host(memory))
        times = local_times(self._passes[1:], intra_host)  # the first one built the buckets
        return gather_profiles(self._world, self._plan, self._routes, self._parameters, times)


def _what(choice: CodecChoice) -> str:
    coded = [codec for codec in choice.codecs.values() if codec != NONE]
    return f"{choice.main_codec} for {len(coded)} of {len(choice.codecs)} parameters" if coded else NONE


def _calibration_key(route: str, codec: str) -> str:
    return f"{codec} by {route}"


def _cheapest_sum(link: LinkModel, measured_size: int, tensor: torch.Tensor, seat: GroupRank) -> Reduction:
    """Sum as is fastest by the link, which was measured among `measured_size` ranks: the same choice on all."""
    if seat.size == measured_size:
        seconds = sum_seconds(link, seat.size, tensor.nbytes)
        if seconds["doubling"] < min(seconds["direct"], seconds["parts"]):
            return recursive_doubling(tensor, seat)
    return reduce_scatter_all_gather(tensor, seat)


# Which codecs and bucket size are best for a step, by core's step model: plain numbers.
#
# [Note: gentleness] Among lossy codecs the gentlest within 3 % of the fastest is taken. And a bucket that hides
# behind backward anyway need not be small: from the first bucket on, buckets get gentler codecs as long as the
# predicted step does not grow by more than 0.5 %, on half of the link.


FASTEST_SLACK = 1.03
_REFINE_SLACK = 1.005
FALLBACK = "int8"
"""For matrices that a low-rank codec does not make smaller."""
_REFINE_MARGIN = 0.5
"""A bucket hides only if it would on half the link: backward and the network take time from each other."""
BUCKET_BYTES = (4 * 2**20, 8 * 2**20, 25 * 2**20)


@dataclass(frozen=True)
class CodecChoice:
    """Codecs by parameter name, the bucket size, and the step time that is expected."""

    plan: BucketPlan
    seconds: float
    """Predicted, times the correction of its main codec."""
    route: str = "flat"

    @property
    def codecs(self) -> Mapping[str, str]:
        """Text of the codec by parameter name."""
        return self.plan.codecs

    @property
    def bucket_bytes(self) -> int:
        """The most bytes of a bucket."""
        return self.plan.bucket_bytes

    @property
    def main_codec(self) -> str:
        """The codec of most parameters that are coded; "none" when no parameter is."""
        names = [codec for codec in self.codecs.values() if codec != NONE]
        return max(sorted(set(names)), key=names.count) if names else NONE


def _as_predicted(codec: str) -> float:
    return 1.0


def choose(
    profile: StepProfile,
    link: LinkModel,
    *,
    lossy: bool,
    first_bucket_bytes: int | None = None,
    correct: Callable[[str], float] = _as_predicted,
    sizes: Sequence[int] = BUCKET_BYTES,
) -> CodecChoice:
    """Return the best choice.

    Args:
        profile: the step without its exchange.
        link: the link as a probe measured it.
        lossy: whether codecs that lose precision are allowed; without, only the bucket size is chosen.
        first_bucket_bytes: the most bytes of the first bucket, which is not chosen. None: as the others.
        correct: what to multiply predictions with, by main codec; see `profile`.
        sizes: the bucket sizes to choose from, in bytes.
    """
    candidates = []
    for codec in CANDIDATES if lossy else CANDIDATES[:1]:
        if codec not in profile.speeds:
            continue
        codecs = assign_codecs(profile, codec)
        if codec != NONE and set(codecs.values()) == {NONE}:
            continue
        for bucket_bytes in sizes:
            plan = BucketPlan(codecs, bucket_bytes, first_bucket_bytes)
            seconds = predict_step(profile, link, plan).seconds * correct(codec)
            candidates.append(CodecChoice(plan, seconds))
    fastest = min(candidate.seconds for candidate in candidates)
    # The list is in the order of gentleness; within a codec the fastest bucket size is taken.
    gentle = next(candidate for candidate in candidates if candidate.seconds <= fastest * FASTEST_SLACK)
    same = [candidate for candidate in candidates if candidate.codecs == gentle.codecs]
    refined = _refine(profile, link, min(same, key=lambda candidate: candidate.seconds))
    return replace(refined, seconds=refined.seconds * correct(refined.main_codec))


def assign_codecs(profile: StepProfile, codec: str) -> dict[str, str]:
    """Return the codec of each gradient where `codec` is for all that can have it."""
    low_rank = CodecSpec.parse(codec).is_low_rank
    fallback = FALLBACK if low_rank and FALLBACK in profile.speeds else NONE
    codecs = {}
    for gradient in profile.gradients:
        if not gradient.can_be_coded:
            codecs[gradient.name] = NONE
        elif low_rank and not gradient.can_be_low_rank:
            codecs[gradient.name] = fallback
        else:
            codecs[gradient.name] = codec
    return codecs


def _refine(profile: StepProfile, link: LinkModel, choice: CodecChoice) -> CodecChoice:
    """Give buckets gentler codecs, from the first on, while the step would not grow even on a slower link."""
    plan = choice.plan
    slower = replace(link, bytes_per_second=link.bytes_per_second * _REFINE_MARGIN)
    limit = predict_step(profile, slower, plan).seconds * _REFINE_SLACK
    for bucket in buckets_of(profile, choice.plan):
        current = plan.codec_of(bucket[0].name)
        if current == NONE:
            continue
        for gentler in CANDIDATES[: CANDIDATES.index(current)]:
            trial = replace(plan, codecs={**plan.codecs, **{gradient.name: gentler for gradient in bucket}})
            if gentler in profile.speeds and predict_step(profile, slower, trial).seconds <= limit:
                plan = trial
                break
    return CodecChoice(plan, predict_step(profile, link, plan).seconds)

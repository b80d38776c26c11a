"""What a layout takes and holds at least: arithmetic of microseconds, to look at a hundred thousand of them.

[Note: bounds and screens] A floor of seconds or bytes is below what is predicted, so a layout whose floor
is over the limit of memory, or slower than a plan that is known, need not be predicted, and nothing is lost. The
screen is no bound: an estimate with the bubble and what is sent, in whose order layouts are predicted. What is
compared in the end is always a prediction.

[Note: both ends] The rank with most is the first one of a pipeline, which keeps most micro-batches, or the one
with the last stage, which has the head. So the screen looks at these two, with stages of equal FLOPs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ...core.cluster import Cluster, collective_work
from ...core.link import ring_factor
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.rules import MOST_ZERO, SEVERAL_STAGES, chunks_of
from ...core.vocabulary.spec import Plan
from ..cost.held import RoughRank
from ..cost.layout import RunLayout
from ..cost.units import is_block
from ..profile import ModelProfile, ModelUnit, unfolded
from .result import ranks_per_host
from .space import SearchLayout

Units = list[tuple[ModelUnit, float]]
_HALF = {"fp32": 1.0}
"""Bytes of an activation, relative to fp32; the others have half."""
_UNIT_SHARE, _HIDES = 0.1, 0.6
"""Guesses for the screen: what of an exchange nothing hides, and what of the computation may hide it."""


@dataclass(eq=False)
class Floor:
    """What a layout takes and holds at least, and the estimate that orders predictions."""

    seconds: float
    nbytes: int
    screen_seconds: float
    room: Callable[[], int]

    @cached_property
    def screen_bytes(self) -> int:
        """What it holds, estimated; of a hundred thousand layouts it is asked for those alone that are fast."""
        return max(self.nbytes, self.room())


class Bounds:
    """The bounds of all layouts of a model on a cluster."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, fixed: Mapping[str, Any]) -> None:
        self._profile, self._cluster, self._fixed = profile, cluster, fixed
        recompute = fixed.get("recompute")
        told_apart = unfolded(profile, recompute) if isinstance(recompute, tuple) else profile
        self._room = Room(told_apart, cluster, fixed)
        units = profile.units
        self._parameters = profile.parameters
        self._experts = sum(unit.count * unit.expert.parameters for unit in units if unit.expert)
        self._divided = sum(unit.count * unit.tensor.parameters for unit in units if unit.tensor)
        self._saved = sum(unit.count * unit.saved_bytes for unit in units)
        self._sums = sum(
            unit.count * 2 * unit.tensor.forward_sums * unit.tensor.sum_bytes for unit in units if unit.tensor
        )
        self._sum_calls = sum(unit.count * 2 * unit.tensor.forward_sums for unit in units if unit.tensor)
        self._seconds: dict[str, tuple[float, float]] = {}
        self._hosts_ranks = cluster.tiers[0].ranks if len(cluster.tiers) > 1 else 1

    def of(self, base: SearchLayout, layouts: Sequence[SearchLayout]) -> list[Floor]:
        """Return the floors of layouts that divide the ranks as `base` does."""
        exchange, parameters = self._gradient_seconds(base), self._local_parameters(base)
        divided = base.tensor * base.context * base.pipeline
        floors = []
        for layout in layouts:
            samples = layout.micro_batch * layout.passes
            both, forward = self._whole(layout.precision)
            compute = samples * both / divided
            again = samples * forward / divided if layout.recompute != Plan.recompute else 0.0
            bubble = self._bubble_passes(layout) * compute / layout.passes if base.pipeline > 1 else 0.0
            sums = samples * self._tensor_seconds(layout) if base.tensor > 1 else 0.0
            shards = 1.5 * exchange * layout.passes if base.zero == MOST_ZERO else exchange
            screen = compute + again + bubble + sums + max(_UNIT_SHARE * shards, shards - _HIDES * compute)
            nbytes = self._bytes(layout, parameters, divided)
            floors.append(Floor(compute, nbytes, screen, partial(self._room.of, layout)))
        return floors

    def _whole(self, precision: str) -> tuple[float, float]:
        """Return the seconds of one sample on a rank that has it all, and of its blocks' forward passes."""
        if precision not in self._seconds:
            times = [(unit, pass_seconds(unit, self._cluster, precision)) for unit in self._profile.units]
            both = sum(unit.count * (forward + backward) for unit, (forward, backward) in times)
            again = sum(unit.count * forward for unit, (forward, _) in times if is_block(unit, self._profile))
            self._seconds[precision] = both, again
        return self._seconds[precision]

    @staticmethod
    def _bubble_passes(layout: SearchLayout) -> float:
        """Return the bubble in passes of one micro-batch."""
        chunks = chunks_of(layout.schedule, layout.chunks)
        share = (layout.pipeline - 1) / chunks
        return share * (1 / 3 if layout.schedule.startswith("zb") else 1)

    def _gradient_seconds(self, layout: SearchLayout) -> float:
        """The exchange of all gradients, hierarchical where there are hosts."""
        ranks = layout.sample_ranks * layout.context
        if ranks == 1:
            return 0.0
        nbytes = 4 * self._local_parameters(layout)
        stride = layout.tensor
        tier = self._cluster.tier_of(ranks, stride)
        inside = max(1, self._hosts_ranks // stride) if tier is not self._cluster.tiers[0] else 1
        cost = tier.collectives["all_reduce"]
        return ring_factor(ranks) * nbytes / inside / cost.bytes_per_second.value

    def _tensor_seconds(self, layout: SearchLayout) -> float:
        """Sums of activations of one sample."""
        cost = self._cluster.tier_of(layout.tensor).collectives["all_reduce"]
        half = _HALF.get(layout.precision, 0.5)
        nbytes = self._sums * half / (layout.context * layout.pipeline)
        work = collective_work("all_reduce", layout.tensor, nbytes)
        rounds = work.rounds * self._sum_calls / layout.pipeline / layout.micro_batch
        return work.sent_bytes / cost.bytes_per_second.value + rounds * cost.latency_seconds.value

    def _local_parameters(self, layout: SearchLayout) -> float:
        """Trainable parameters of the mean rank of a pipeline."""
        experts = self._experts / layout.expert
        rest = self._parameters - self._experts
        divided = min(self._divided, rest)
        return (experts + rest - divided + divided / layout.tensor) / layout.pipeline

    def _bytes(self, layout: SearchLayout, parameters: float, divided: int) -> int:
        """States of the mean stage, and what one micro-batch leaves without recomputation."""
        width = 2 if layout.precision == "bf16-weights" else 4
        sharing = layout.sharing
        weights = parameters * width / (sharing if layout.zero == MOST_ZERO else 1)
        gradients = parameters * width / (sharing if layout.zero > 1 else 1)
        states = parameters * self._profile.optimizer_state_bytes * width / 4 / sharing
        if self._fixed.get("offload") == "disk":
            states = 0.0
        saved = 0.0
        if layout.recompute == Plan.recompute:
            saved = self._saved * layout.micro_batch * _HALF.get(layout.precision, 0.5) / divided
        return round(weights + gradients + states + saved)


def pass_seconds(unit: ModelUnit, cluster: Cluster, precision: str) -> tuple[float, float]:
    """Return the seconds of forward and of backward of one of a unit and one sample, at the least."""
    if unit.times is not None and precision == "fp32":
        return unit.times.forward_sample_seconds, unit.times.backward_sample_seconds
    name = "bf16" if precision == "bf16-weights" else precision
    device = cluster.device
    rates = device.compute[device.compute_as(name) or next(iter(device.compute))]
    best = max(each.flops_per_second.value for each in rates)
    attention = device.attention_as(name)
    if attention:
        best = max(best, device.attention_flops_per_second[attention].value)
    return unit.forward_flops / best, unit.backward_flops / best


class Room:
    """What layouts of a model take. Remembers what layouts have in common."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, fixed: Mapping[str, Any]) -> None:
        self._profile, self._cluster, self._fixed = profile, cluster, fixed
        self._ends: dict[tuple[Any, ...], list[RoughRank]] = {}
        self._states: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        self._taken: dict[tuple[Any, ...], int] = {}
        self._runs: dict[SearchLayout, RunLayout | None] = {}

    def of(self, layout: SearchLayout) -> int:
        """Return the bytes of the rank that takes most; 0 where there is no such plan."""
        meets, schedule = layout.schedule == "zb-v", layout.schedule
        chunks = chunks_of(schedule, layout.chunks) if layout.pipeline > 1 else 1
        way = (
            layout.pipeline, layout.tensor, layout.context, layout.expert, chunks, meets, layout.recompute,
            layout.precision, layout.zero == MOST_ZERO, layout.sample_ranks * layout.context > 1,
        )  # fmt: skip
        sharing = way, layout.zero, layout.data, layout.shard
        if sharing not in self._states:
            run = self._run(layout)
            if run is None:
                return 0
            if way not in self._ends:
                parts = ends_of(self._profile.units, layout.pipeline * chunks, chunks, meets)
                self._ends[way] = [RoughRank(self._profile, units, run) for units in parts]
            self._states[sharing] = [each.states(self._profile, run) for each in self._ends[way]]
        most, kept = 0, kept_at_ends(schedule, layout.pipeline, layout.passes, chunks)
        for end, (state, step), passes in zip(self._ends[way], self._states[sharing], kept, strict=False):
            key = id(end), layout.micro_batch, passes
            if key not in self._taken:
                self._taken[key] = end.activation_bytes(layout.micro_batch, passes)
            most = max(most, state + max(step, self._taken[key]))
        return most

    def _run(self, layout: SearchLayout) -> RunLayout | None:
        """Return a plan that divides a model as `layout` does, whatever its schedule; None: there is none."""
        key = layout._replace(micro_batch=1, passes=1, schedule="", chunks=0)
        if key not in self._runs:
            self._runs[key] = None
            with contextlib.suppress(PlanError):  # what is wrong is said where it is predicted
                plan = layout.to_candidate(self._fixed)
                hosts = ranks_per_host(self._cluster)
                self._runs[key] = RunLayout.of(plan, hosts, on_device=not self._cluster.on_cpus)
        return self._runs[key]


def ends_of(units: Sequence[ModelUnit], stages: int, chunks: int, meets: bool) -> list[Units]:
    """Return the units of the first rank and of the last one; `meets`: the first has the last stage too.

    Where a rank has several stages the others are taken to be like the mean one.
    """
    if stages == 1:
        return [[(unit, float(unit.count)) for unit in units]]
    flops = sum(unit.count * (unit.forward_flops + unit.backward_flops) for unit in units)
    first, last = (_end(order, flops / stages) for order in (units, units[::-1]))
    if meets:
        return [[*first, *last]]
    others = [(unit, unit.count * (chunks - 1) / stages) for unit in units] if chunks > 1 else []
    return [[*first, *others], [*last, *others]]


def _end(units: Sequence[ModelUnit], flops: float) -> Units:
    """Return the units from the first one on, until they have so many FLOPs; at least one."""
    found: Units = []
    for unit in units:
        each = unit.forward_flops + unit.backward_flops
        fitting = flops / each if each else unit.count
        count = min(unit.count, round(fitting))
        if not count and found:
            break
        found.append((unit, float(max(1, count))))
        flops -= max(1, count) * each
        if flops <= 0 or count < unit.count:
            break
    return found


def kept_at_ends(schedule: str, pipeline: int, micro_batches: int, chunks: int) -> tuple[float, float]:
    """Return how many micro-batches the first and the last rank keep at most at once, of all of their stages.

    What `in_flight` counts in schedules that are built, divided by the stages of a rank.
    """
    if pipeline == 1:
        return 1.0, 1.0
    if schedule == "gpipe":
        return micro_batches, micro_batches
    if schedule in SEVERAL_STAGES and schedule != "zb-v":
        first = pipeline + (pipeline - 1) / chunks
        last = pipeline - (pipeline - 1) / chunks
        return min(micro_batches, first), min(micro_batches, last)
    first = min(micro_batches, pipeline)
    return first, 1 if schedule == "1f1b" else first

"""What the search found: plans with their predictions, by family, and why others are not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ...core.cluster.cluster import Cluster, Coefficient, CollectiveCost, Tier
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.predicted import GLOBAL_BATCH, HIGH, LOW, PEAK, RANKS, STEP
from ...core.vocabulary.spec import Plan
from ..candidate import Candidate, Prediction
from .request import SearchRequest

# The same cluster with another link or memory: for questions such as "what if the link were faster".


def ranks_per_host(cluster: Cluster) -> int:
    """Return the ranks of the innermost tier; all, if there is one tier."""
    return cluster.tiers[0].ranks


def with_limit(cluster: Cluster, limit_bytes: int) -> Cluster:
    """Return the cluster, whose ranks may use so many bytes."""
    memory = replace(cluster.device.memory_bytes, value=float(limit_bytes), low=None, high=None)
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def with_faster_link(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster, whose outermost link has `factor` times the bytes per second."""
    outer = cluster.tiers[-1]
    faster: dict[str, CollectiveCost] = {
        name: replace(cost, bytes_per_second=_times(cost.bytes_per_second, factor))
        for name, cost in outer.collectives.items()
    }
    line, pair = (
        None if each is None else _times(each, factor)
        for each in (outer.line_bytes_per_second, outer.pair_bytes_per_second)
    )  # fmt: skip
    tier: Tier = replace(outer, collectives=faster, line_bytes_per_second=line, pair_bytes_per_second=pair)
    return replace(cluster, tiers=(*cluster.tiers[:-1], tier))


def _times(figure: Coefficient, factor: float) -> Coefficient:
    low, high = figure.interval()
    return replace(figure, value=figure.value * factor, low=low * factor, high=high * factor)


Status = Literal["chosen", "slower", "does not fit", "impossible"]


def _rounded(seconds: float) -> float:
    """Return so many digits as a prediction has: its order is kept."""
    return float(f"{seconds:.4g}")


@dataclass(frozen=True)
class PredictedPlan:
    """A plan and what is predicted of it."""

    family: str
    candidate: Candidate
    prediction: Prediction

    def predicted(self) -> dict[str, float]:
        """Return what the plan file says of a step, to be held to it."""
        candidate, prediction = self.candidate, self.prediction
        return {
            STEP: _rounded(prediction.seconds),
            LOW: _rounded(prediction.low_seconds),
            HIGH: _rounded(prediction.high_seconds),
            PEAK: float(prediction.peak_bytes),
            RANKS: float(candidate.ranks),
            GLOBAL_BATCH: float(candidate.global_batch),
            **{str(term): _rounded(seconds) for term, seconds in prediction.terms.items()},
        }

    @property
    def samples_per_second(self) -> float:
        """All ranks together."""
        return self.candidate.global_batch / self.prediction.seconds


@dataclass(frozen=True)
class PlanFamily:
    """A kind of plan: the best of it, and why it was not chosen."""

    name: str
    status: Status
    option: PredictedPlan | None
    """The best that fits; if none does the one that needs least memory; None: impossible.

    Both ends of the interval are known for the chosen one alone: others have the value there.
    """
    reason: str
    """With the number that killed it; empty for the chosen one."""


@dataclass(frozen=True)
class DrawnPlan:
    """A plan of the drawing."""

    plan: str
    """In words."""
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Tried:
    """A plan that was run for some steps."""

    plan: str
    """In words."""
    predicted_seconds: float
    seconds: float | None
    """A step takes so long, measured; None: it failed."""
    outcome: str
    """What happened, such as "ok" or "out of memory"."""


@dataclass(frozen=True)
class WhatIf:
    """What another cluster, limit or batch would change."""

    what: str
    """Such as "a link between hosts twice as fast"."""
    option: PredictedPlan | None
    """The best plan then; None: none fits."""
    gain: float
    """Samples per second then, over those of the chosen plan, minus 1."""
    is_other_plan: bool


@dataclass(frozen=True)
class PlanAnswer:
    """What the planner says."""

    request: SearchRequest
    model: str
    cluster: str
    ranks_per_host: int
    limit_bytes: int
    """Memory of a rank."""
    best: PredictedPlan | None
    """None: no plan fits."""
    families: tuple[PlanFamily, ...]
    """The chosen one first, then by what they lack."""
    frontier: tuple[PredictedPlan, ...] = ()
    """Plans that no other beats in both memory and time, from the least memory on."""
    points: tuple[DrawnPlan, ...] = ()
    """Plans that were predicted, for the drawing."""
    constraint: str = ""
    """What keeps the best plan from being better."""
    next_bottleneck: str = ""
    changes: tuple[WhatIf, ...] = ()
    needs: tuple[str, ...] = ()
    """What the training script must do for this plan."""
    warnings: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    """If nothing fits: by how much, and what would make it fit."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Layouts that there are, that were predicted, and so on."""
    stage_seconds: tuple[tuple[float, float], ...] = ()
    """Forward and backward of one micro-batch, by stage, for the drawing of the schedule."""
    trials: tuple[Tried, ...] = ()
    """What was measured of the best plans; the first one that worked and was fastest is `best`."""

    @property
    def plan(self) -> Plan:
        """The plan to apply. Raises `PlanError` if none fits."""
        if self.best is None:
            raise PlanError("; ".join(self.advice) or "no plan fits")
        return replace(self.best.candidate.plan, predicted=self.best.predicted())

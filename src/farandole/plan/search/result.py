"""What the search found: plans with their predictions, by family, and why others are not there."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from ...core.cluster import Cluster, Coefficient, CollectiveCost, Tier
from ...core.vocabulary.config import convert
from ...core.vocabulary.degrees import ORDER, REST
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import GLOBAL_BATCH, HIGH, LOW, PEAK, RANKS, STEP, Plan
from ...core.vocabulary.sync_spec import EVERY_STEP
from ...core.vocabulary.text import did_you_mean
from ..candidate import Candidate, Prediction

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


# What the planner is asked for, checked before anything is searched.


Goal = Literal["throughput", "memory", "cost", "time"]
GOALS: Final[tuple[Goal, ...]] = ("throughput", "memory", "cost", "time")
"""The most samples a second on all ranks; the least memory on all ranks; the least rank-seconds for a sample, and
the shortest step, both on as many ranks as that takes."""
FEWER_RANKS: Final[tuple[Goal, ...]] = ("cost", "time")
"""Goals for which fewer ranks than there are may be best."""
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-weights")
"""What `SearchRequest.precisions` may name; "bf16-weights": `bf16_parameters` too."""
_NO_PRECISIONS = {
    "fp8": "a model has layers of 8 bits from a library, such as torchao, and no plan changes layers into these",
    "tf32": (
        'a switch of torch for the whole process, torch.set_float32_matmul_precision("high"), and no key of a '
        "plan; predictions in fp32 are without it"
    ),
}
"""What is asked for, and no plan has."""
MOST_RANKS = 65536
MOST_SAMPLES = 2**20
"""Samples of a step for each rank that there is. At a tenth of a millisecond a sample, which is little for a model
that needs a plan, such a step takes 105 s; a larger number is most likely one of tokens, or a slip."""
LEAST_MEMORY_BYTES = 2**20
"""Bytes of a rank; fewer are a slip, such as a number without its unit."""
_NOT_FIXED = ("version",)


@dataclass(frozen=True)
class SearchRequest:
    """What is asked for. Raises `PlanError` for values that cannot be."""

    ranks: int
    """How many there are."""
    global_batch: int
    """Samples of one step of the optimizer, over all ranks."""
    goal: Goal = "throughput"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the plan that are given, with their values; see `parse_fixed`."""
    allow_lossy: bool = False
    """Whether codecs may lose something."""
    memory_bytes: int | None = None
    """What a rank may use; None: what the cluster says."""
    precisions: tuple[str, ...] = ("fp32",)
    """What may be chosen of `PRECISIONS`. Other than the user's own precision changes results."""
    effort: int = 3000
    """About how many plans are predicted, counted in plans without a pipeline; small spaces need fewer."""

    @property
    def choices(self) -> dict[str, Any]:
        """What is fixed and could be otherwise; a recipe says what layers are."""
        return {key: value for key, value in self.fixed.items() if key != "tensor_recipe"}

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise PlanError(f"--goal {self.goal}: no such goal", remedy=f"expected one of {', '.join(GOALS)}")
        for name, value, most in (
            ("ranks", self.ranks, MOST_RANKS), ("global batch", self.global_batch, None),
            ("effort", self.effort, None),
        ):  # fmt: skip
            if value < 1 or (most is not None and value > most):
                limit = f" and at most {most}" if most is not None else ""
                raise PlanError(f"{name} = {value}, expected at least 1{limit}")
        if self.global_batch > MOST_SAMPLES * self.ranks:
            raise PlanError(
                f"global batch = {self.global_batch}: {-(-self.global_batch // self.ranks)} samples of a step for "
                f"each of {self.ranks} ranks, expected at most {MOST_SAMPLES} ({MOST_SAMPLES * self.ranks} "
                "in all)",
                remedy="give the samples of one step: of a language model these are sequences, not tokens",
            )
        if self.memory_bytes is not None and self.memory_bytes < LEAST_MEMORY_BYTES:
            raise PlanError(
                f"memory = {self.memory_bytes} bytes of a rank, expected at least {LEAST_MEMORY_BYTES}",
                remedy="give it with its unit, such as 8GB or 8GiB",
            )
        for precision in self.precisions:
            if precision not in PRECISIONS:
                why = _NO_PRECISIONS.get(precision, "no such precision")
                expected = f"expected some of {', '.join(PRECISIONS)}"
                raise PlanError(f"--precision {precision}: {why}", remedy=expected)
        if self.fixed.get("weight_versions", 1) != 1:
            raise PlanError(
                f"--fix weight_versions={self.fixed['weight_versions']} changes what is trained (gradients of "
                "weights one step old), and plans are compared that train the same",
                remedy="set it in the plan that comes out, or with --set, and predict that plan",
            )
        if self.fixed.get("sync", EVERY_STEP) != EVERY_STEP:
            raise PlanError(
                f"--fix sync={self.fixed['sync']} changes what is trained, and compared plans train alike",
                remedy="set it in the plan that comes out, or with --set",
            )
        if not self.precisions:
            raise PlanError("no precision is allowed", remedy=f"name one of {', '.join(PRECISIONS)}")


def parse_fixed(settings: Iterable[str]) -> dict[str, Any]:
    """Return the keys and values of ``--fix key=value``, each of the type that the plan has.

    A degree that is "rest" is not fixed at all.

    Raises:
        PlanError: no key=value, a key that a plan does not have, one given twice, or a value of another type.

    >>> parse_fixed(["tensor=1", "recompute=blocks"])
    {'tensor': 1, 'recompute': 'blocks'}
    """
    hints = typing.get_type_hints(Plan)
    known = [each.name for each in fields(Plan) if each.name not in _NOT_FIXED]
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not key:
            raise PlanError(f"--fix {setting!r}: expected key=value", remedy="such as --fix tensor=1")
        if key not in known:
            raise PlanError(f"--fix {setting}: a plan has no key {key!r}", remedy=did_you_mean(key, known))
        value = convert(text, hints[key], where=f"--fix {key}", name=key, error=PlanError)
        if key in found and found[key] != value:
            raise PlanError(f"--fix {key}={text}: {key} is fixed to {found[key]!r} too", remedy="drop one of them")
        if key in ORDER and value != REST and value < 1:
            raise PlanError(f"--fix {setting}: expected at least 1")
        found[key] = value
    return {key: value for key, value in found.items() if not (key in ORDER and value == REST)}

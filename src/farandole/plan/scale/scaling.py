"""How a plan scales: its step, throughput, efficiency and goodput over numbers of ranks.

::

    answer = simulate_scale(profile, cluster, ScaleRequest(plan, ranks=(8, 64, 512), global_batch=64), predict)

[Note: what grows] A plan has one degree that grows with the ranks: the one that is "rest", else `data` (of a plan
that shards over all of its ranks, `shard`). Weak scaling keeps the samples of a rank, so the global batch grows;
strong scaling keeps the global batch, so a rank has ever fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ...core.cluster.cluster import Cluster
from ...core.cluster.coefficient import Coefficient
from ...core.cluster.resize import with_ranks
from ...core.vocabulary.degrees import ORDER, OTHER_SAMPLES, REST, Degrees, degrees_of
from ...core.vocabulary.errors import ConfigError, FarandoleError, PlanError
from ...core.vocabulary.spec import Plan
from ..candidate import Candidate, Prediction, Term
from ..model.profile import ModelProfile
from .request import Mode, ScaleRequest

Predictor = Callable[[ModelProfile, Cluster, Candidate], Prediction]
_EXCHANGES: Final[tuple[Term, ...]] = ("data", "shard", "tensor", "context", "expert", "transfer", "codec")
"""Terms of a prediction that are communication that nothing hides."""
_WAITS: Final[tuple[Term, ...]] = ("straggler", "loader")


@dataclass(frozen=True)
class ScalePoint:
    """A job of one size. Seconds are those of a step."""

    mode: Mode
    ranks: int
    degrees: str
    global_batch: int
    prediction: Prediction
    """By the cost model, with the slow ranks and the loading that were asked for."""
    fits: bool
    """Whether the rank that holds most has the memory."""
    efficiency: float = 1.0
    """Samples a second and rank, over those of the smallest size."""
    goodput: float = 1.0
    """Share of the time that is work that is kept; 1 without failures."""
    failure_seconds: float | None = None
    """Mean time between failures of the job; None: none are counted."""
    save_every_seconds: float | None = None
    """Training between two checkpoints, as given or the best; None: failures are not counted."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.prediction.seconds

    @property
    def communication_seconds(self) -> float:
        """Exchanges that nothing hides."""
        return sum(self.prediction.terms.get(name, 0.0) for name in _EXCHANGES)

    @property
    def waiting_seconds(self) -> float:
        """Waiting for slow or varying ranks, and for data."""
        return sum(self.prediction.terms.get(name, 0.0) for name in _WAITS)

    @property
    def samples_per_second(self) -> float:
        """While it goes on: without failures."""
        return self.global_batch / self.seconds

    @property
    def communication_share(self) -> float:
        """Communication as a share of the step."""
        return self.communication_seconds / self.seconds


@dataclass(frozen=True)
class LeftOut:
    """Sizes that are missing."""

    mode: Mode
    ranks: tuple[int, ...]
    why: str
    """The first one's reason."""

    def to_text(self) -> str:
        """Return which they are, and why."""
        return f"{self.mode} scaling on {', '.join(f'{each:,}' for each in self.ranks)} ranks: {self.why}"


@dataclass(frozen=True)
class ScaleAnswer:
    """A plan over sizes."""

    model: str
    cluster: str
    grows: str
    """The degree that grows with the ranks."""
    points: tuple[ScalePoint, ...]
    """By mode and size."""
    left_out: tuple[LeftOut, ...]
    assumptions: tuple[str, ...]
    """Slow ranks and failures, in words."""
    warnings: tuple[str, ...]

    def of(self, mode: Mode) -> list[ScalePoint]:
        """Return the points of a mode."""
        return [point for point in self.points if point.mode == mode]


def simulate_scale(
    profile: ModelProfile, cluster: Cluster, request: ScaleRequest, predict: Predictor
) -> ScaleAnswer:
    """Return how a plan scales. See [Note: what grows].

    Args:
        profile: the model.
        cluster: figures of the machines; sizes beyond its ranks have more of its outermost tier. Ranks that it
            says are slow are slow ranks.
        request: plan, sizes, and what goes wrong.
        predict: the cost model: `farandole.plan.cost.predict.predict`.

    Raises:
        ConfigError: no size fits the cluster's hosts.
        PlanError: no size fits the degrees of the plan, or the model or the cluster cannot be costed.
    """
    name, plan = growing(request.plan)
    warnings: dict[str, None] = {}
    if request.ranks[-1] > cluster.ranks:
        warnings[
            f"the cluster has {cluster.ranks:,} ranks: for more, the figures of its tier "
            f"{cluster.tiers[-1].name!r} are taken"
        ] = None
    points: list[ScalePoint] = []
    left_out: list[LeftOut] = []
    refused: FarandoleError | None = None
    for mode in request.modes:
        of_mode: list[ScalePoint] = []
        missing: dict[int, str] = {}
        for ranks in request.ranks:
            try:
                sized = _sized_cluster(cluster, request, degrees_of(plan, ranks))
                candidate = candidate_of(plan, ranks, request, mode)
                prediction = predict(profile, sized, candidate)
            except (PlanError, ConfigError) as problem:
                missing[ranks] = str(problem)
                refused = refused or problem
                continue
            warnings.update(dict.fromkeys(prediction.warnings))
            point = _point(mode, candidate, prediction, request, cluster.device.memory_bytes.value)
            of_mode.append(_beside(point, of_mode[0]) if of_mode else point)
        points += of_mode
        if missing:
            left_out.append(LeftOut(mode, tuple(missing), next(iter(missing.values()))))
    if refused is not None and not points:
        raise refused
    return ScaleAnswer(
        profile.name,
        cluster.name,
        name,
        tuple(points),
        tuple(left_out),
        tuple(_assumptions(request, name)),
        tuple(warnings),
    )


def growing(plan: Plan) -> tuple[str, Plan]:
    """Return the degree that grows, and the plan in which it is the rest. See [Note: what grows]."""
    rest = [name for name in ORDER if getattr(plan, name) == REST and name != "data"]
    name = rest[0] if rest else "shard" if plan.data == 1 and plan.shard != 1 else "data"
    if name == "data":
        return name, replace(plan, data=REST)
    return name, Plan.from_mapping({**plan.to_mapping(), "data": 1, name: REST}, where="plan")


def candidate_of(plan: Plan, ranks: int, request: ScaleRequest, mode: Mode) -> Candidate:
    """Return the job of one size."""
    degrees = degrees_of(plan, ranks)
    batch = request.global_batch
    if mode == "weak":
        first = degrees_of(plan, request.ranks[0])
        own, smallest = _samples_ranks(degrees), _samples_ranks(first)
        if batch % smallest:
            raise PlanError(
                f"global batch {batch} does not divide among {smallest} replicas",
                remedy=f"use a multiple of {smallest}",
            )
        batch = batch // smallest * own
    return Candidate(plan, ranks, batch)


def usual_batch(plan: Plan, profile: ModelProfile, ranks: int) -> int:
    """Return the global batch of the smallest size: each replica has what the plan was predicted for.

    Without a prediction in the plan, each pass of each replica has the batch of the profile.
    """
    grown = growing(plan)[1]
    degrees = degrees_of(grown, ranks)
    known = plan.predicted.get("ranks"), plan.predicted.get("global_batch")
    planned = _degrees(plan, int(known[0])) if known[0] else None
    if planned is not None and known[1] and known[1] % _samples_ranks(planned) == 0:
        return int(known[1]) // _samples_ranks(planned) * _samples_ranks(degrees)
    micro_batches = plan.micro_batches or (2 * degrees.pipeline if degrees.pipeline > 1 else 1)
    return profile.samples * _samples_ranks(degrees) * micro_batches * plan.accumulate


def _degrees(plan: Plan, ranks: int) -> Degrees | None:
    """Return the mesh of so many ranks; None: they do not fit."""
    try:
        return degrees_of(plan, ranks)
    except PlanError:
        return None


def _samples_ranks(degrees: Degrees) -> int:
    return degrees.size_over(OTHER_SAMPLES)


def _point(
    mode: Mode, candidate: Candidate, prediction: Prediction, request: ScaleRequest, memory: float
) -> ScalePoint:
    """Return the point of one size; `memory`: bytes of a rank."""
    ranks, failures = candidate.ranks, request.failures
    return ScalePoint(
        mode,
        ranks,
        str(degrees_of(candidate.plan, ranks)),
        candidate.global_batch,
        prediction,
        fits=prediction.peak_bytes <= memory,
        goodput=1.0 if failures is None else failures.goodput(ranks),
        failure_seconds=None if failures is None else failures.between_seconds(ranks),
        save_every_seconds=None if failures is None else failures.interval_seconds(ranks),
    )


def _sized_cluster(cluster: Cluster, request: ScaleRequest, degrees: Degrees) -> Cluster:
    """Return the cluster with the ranks of `degrees`, the slow ones, and what loads samples of each replica."""
    sized = with_ranks(cluster, degrees.size)
    slow = {rank: 1 / factor for rank, factor in request.slow_ranks.items()}
    loader, storage = sized.loader_bytes_per_second, request.storage_bytes_per_second
    if loader is not None:
        low, high = loader.interval()
        workers = request.loader_workers
        loader = replace(loader, value=workers * loader.value, low=workers * low, high=workers * high)
    if storage is not None:
        own = storage / _samples_ranks(degrees)
        loader = Coefficient(own) if loader is None or own < loader.value else loader
    return replace(sized, rank_speeds={**sized.rank_speeds, **slow}, loader_bytes_per_second=loader)


def _beside(point: ScalePoint, first: ScalePoint) -> ScalePoint:
    each = first.samples_per_second / first.ranks
    return replace(point, efficiency=point.samples_per_second / point.ranks / each)


def _assumptions(request: ScaleRequest, grows: str) -> list[str]:
    said = getattr(request.plan, grows)
    first = _degrees(growing(request.plan)[1], request.ranks[0])
    own = None if first is None else getattr(first, grows)
    found = [] if said in (REST, 1, own) else [f"{grows} is what the ranks give, not the plan's {said}"]
    found += [f"rank {rank} computes {factor:g} times as long" for rank, factor in request.slow_ranks.items()]
    if request.failures is not None:
        failures = request.failures
        found.append(
            f"{failures.describe()}; a checkpoint stops training for {failures.save_seconds:g} s, a restart takes "
            f"{failures.restart_seconds:g} s"
        )
    return found

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
from ...core.cluster.resize import with_ranks
from ...core.vocabulary.degrees import ORDER, OTHER_SAMPLES, REST, Degrees, degrees_of
from ...core.vocabulary.errors import ConfigError, FarandoleError, PlanError
from ...core.vocabulary.spec import Plan
from ..candidate import Candidate, Prediction, Term
from ..model.profile import ModelProfile
from .noisy_step import noisy_step_seconds
from .request import Mode, ScaleRequest
from .simulated_run import slowed
from .step_roles import step_seconds
from .step_work import StepWork
from .work_of import PlacedWork, work_of

Predictor = Callable[[ModelProfile, Cluster, Candidate], Prediction]
_EXCHANGES: Final[tuple[Term, ...]] = ("data", "shard", "tensor", "context", "expert", "transfer", "codec")
"""Terms of a prediction that are communication that nothing hides."""


@dataclass(frozen=True)
class ScalePoint:
    """A job of one size. Seconds are those of a step."""

    mode: Mode
    ranks: int
    degrees: str
    global_batch: int
    prediction: Prediction
    """By the cost model, without what was asked for."""
    slow_link_seconds: float
    """What slow links add."""
    straggler_seconds: float
    """What slow ranks add."""
    noise_seconds: float
    """What waiting for the slowest of varying ranks adds."""
    loader_seconds: float
    """Waiting for the batch that the prediction does not have."""
    fits: bool
    """Whether the rank that holds most has the memory."""
    efficiency: float = 1.0
    """Samples a second and rank, over those of the smallest size."""
    goodput: float = 1.0
    """Share of the time that is work that is kept; 1 without failures."""
    failure_seconds: float | None = None
    """Mean time between failures of the job; None: none are counted."""

    @property
    def predicted_seconds(self) -> float:
        """The step on equal ranks: slow ranks of the cluster file are in `straggler_seconds`."""
        return self.prediction.seconds - self.prediction.terms.get("straggler", 0.0)

    @property
    def seconds(self) -> float:
        """The whole step."""
        return (
            self.predicted_seconds + self.slow_link_seconds + self.straggler_seconds + self.noise_seconds
            + self.loader_seconds
        )  # fmt: skip

    @property
    def communication_seconds(self) -> float:
        """Exchanges that nothing hides, slow links included."""
        return sum(self.prediction.terms.get(name, 0.0) for name in _EXCHANGES) + self.slow_link_seconds

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
    """Slow ranks, noise, failures, in words."""
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
        ConfigError: a slow rank or link is not in the smallest job; no size fits the cluster's hosts.
        PlanError: no size fits the degrees of the plan, or the model or the cluster cannot be costed.
    """
    name, plan = growing(request.plan)
    _refuse_slow(request, cluster)
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
                sized = sized_cluster(cluster, ranks, request)
                size = _Size(profile, sized, replace(request, plan=plan), mode, ranks)
                point, said = size.point(predict)
            except (PlanError, ConfigError) as problem:
                missing[ranks] = problem.message
                refused = refused or problem
                continue
            warnings.update(dict.fromkeys(said))
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


def _refuse_slow(request: ScaleRequest, cluster: Cluster) -> None:
    smallest = request.ranks[0]
    hosts = -(-smallest // ranks_per_host(cluster, smallest))
    for what, numbers, count in (("rank", request.slow_ranks, smallest), ("host", request.slow_links, hosts)):
        for number in numbers:
            if number >= count:
                raise ConfigError(
                    f"slow {what} {number}: the smallest job has {what}s 0 to {count - 1}",
                    remedy=f"name one of them, or begin with a larger size than {smallest} ranks",
                )


def ranks_per_host(cluster: Cluster, ranks: int) -> int:
    """Return the ranks of a host: of the innermost tier."""
    return max(1, min(cluster.tiers[0].ranks, ranks))


@dataclass(frozen=True)
class _Size:
    """One size of a job."""

    profile: ModelProfile
    cluster: Cluster
    request: ScaleRequest
    mode: Mode
    ranks: int

    def point(self, predict: Predictor) -> tuple[ScalePoint, list[str]]:
        """Return the point, and warnings."""
        candidate = candidate_of(self.request.plan, self.ranks, self.request, self.mode)
        prediction = predict(self.profile, self.cluster, candidate)
        placed = work_of(self.profile, self.cluster, candidate, prediction)
        point = self._stepped(candidate, prediction, placed)
        failures = self.request.failures
        if failures is not None:
            point = replace(
                point,
                goodput=failures.goodput(self.ranks),
                failure_seconds=failures.between_seconds(self.ranks),
            )
        return point, [*prediction.warnings, *placed.warnings]

    def _stepped(self, candidate: Candidate, prediction: Prediction, placed: PlacedWork) -> ScalePoint:
        slow = slow_ranks_of(self.cluster, self.request, self.ranks)
        usual, linked = placed.work, slowed(placed.work, self.request.slow_links)
        even = step_seconds(linked)
        straggling = step_seconds(linked, slow) if slow else even
        noisy = noisy_step_seconds(linked, self.request.noise, slow)
        link_seconds = max(0.0, even - step_seconds(usual)) if self.request.slow_links else 0.0
        point = ScalePoint(
            mode=self.mode,
            ranks=self.ranks,
            degrees=str(usual.degrees),
            global_batch=candidate.global_batch,
            prediction=prediction,
            slow_link_seconds=link_seconds,
            straggler_seconds=max(0.0, straggling - even),
            noise_seconds=max(0.0, noisy - straggling),
            loader_seconds=0.0,
            fits=prediction.peak_bytes <= self.cluster.device.memory_bytes.value,
        )
        coming = coming_seconds(self.profile, self.request, usual, candidate)
        return replace(point, loader_seconds=max(0.0, coming - point.seconds))


def coming_seconds(profile: ModelProfile, request: ScaleRequest, work: StepWork, candidate: Candidate) -> float:
    """Return what the batch of a step takes to come, if nothing else is waited for."""
    rank_bytes = profile.batch_bytes * work.rank_samples
    return request.loading.seconds(rank_bytes, profile.batch_bytes * candidate.global_batch)


def sized_cluster(cluster: Cluster, ranks: int, request: ScaleRequest) -> Cluster:
    """Return the cluster with `ranks` ranks; without a loader where the request says what loads batches."""
    sized = with_ranks(cluster, ranks)
    if request.loading.worker_bytes_per_second is None:
        return sized
    return replace(sized, loader_bytes_per_second=None)


def slow_ranks_of(cluster: Cluster, request: ScaleRequest, ranks: int) -> dict[int, float]:
    """Return how many times its usual time a slow rank's computing takes: as asked for, or as the cluster says."""
    known = {rank: 1 / speed for rank, speed in cluster.rank_speeds.items() if speed < 1 and rank < ranks}
    return {**known, **request.slow_ranks}


def _beside(point: ScalePoint, first: ScalePoint) -> ScalePoint:
    each = first.samples_per_second / first.ranks
    return replace(point, efficiency=point.samples_per_second / point.ranks / each)


def _assumptions(request: ScaleRequest, grows: str) -> list[str]:
    said = getattr(request.plan, grows)
    first = _degrees(growing(request.plan)[1], request.ranks[0])
    own = None if first is None else getattr(first, grows)
    found = [] if said in (REST, 1, own) else [f"{grows} is what the ranks give, not the plan's {said}"]
    found += [f"rank {rank} computes {factor:g} times as long" for rank, factor in request.slow_ranks.items()]
    found += [
        f"exchanges over host {host}'s link take {factor:g} times as long"
        for host, factor in request.slow_links.items()
    ]
    if not request.noise.is_none:
        tail = {"gaussian": "Gaussian", "exponential": "exponential", "measured": "measured"}[request.noise.tail]
        found.append(f"computing of a rank varies by {request.noise.share:.1%} from step to step ({tail} tails)")
    if request.failures is not None:
        failures = request.failures
        found.append(
            f"{failures.describe()}; a checkpoint stops training for {failures.save_seconds:g} s, a restart takes "
            f"{failures.restart_seconds:g} s"
        )
    return found

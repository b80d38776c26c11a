"""How a plan scales: its step, throughput, efficiency and goodput over numbers of ranks.

::

    answer = simulate_scale(profile, cluster, ScaleRequest(plan, ranks=(8, 64, 512), global_batch=64), predict)

[Note: what grows] A plan has one degree that grows with the ranks: the one that is "rest", else `data` (of a plan
that shards over all of its ranks, `shard`). Weak scaling keeps the samples of a rank, so the global batch grows;
strong scaling keeps the global batch, so a rank has ever fewer.

[Note: time that failures cost] Failures come at a constant rate, independent of each other: a job of N ranks fails
N times as often as one rank. A failure loses the work since the last checkpoint, and a restart follows, which may
fail too. The expected time of an interval of w seconds of work and c of saving, with M seconds between failures
and R of restart, is M e^(R/M) (e^((w + c)/M) - 1): Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22, 2006, section 3. Goodput is w over that. The best w is about sqrt(2 c M) - c
(Young, CACM 17(9), 1974), in Daly's expansion sqrt(2 c M) (1 + sqrt(c/2M)/3 + c/18M) - c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ..core.cluster import Cluster, Coefficient, with_ranks
from ..core.vocabulary.degrees import ORDER, OTHER_SAMPLES, REST, Degrees, degrees_of
from ..core.vocabulary.errors import ConfigError, FarandoleError, PlanError
from ..core.vocabulary.rules import check
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.units import format_seconds, parse_seconds, read_option
from .candidate import Candidate, Prediction, Term
from .profile import ModelProfile

# What to predict: sizes, slow ranks, failures, loading; and how a command line says it.

Mode = Literal["weak", "strong"]
MODES: Final[tuple[Mode, ...]] = ("weak", "strong")
MOST_RANKS = 1_048_576
MOST_SIZES = 64


@dataclass(frozen=True)
class ScaleRequest:
    """What to predict."""

    plan: Plan
    ranks: tuple[int, ...]
    """Sizes of the job, ascending."""
    global_batch: int
    """Samples of a step: of the smallest size with weak scaling, of all with strong scaling."""
    modes: tuple[Mode, ...] = MODES
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """How many times its usual time a rank's computing takes."""
    failures: FailureModel | None = None
    loader_workers: int = 1
    """How many load a rank's batches, each as fast as the cluster's loader."""
    storage_bytes_per_second: float | None = None
    """What all ranks together read; None: no limit."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or list(self.ranks) != sorted(set(self.ranks)):
            raise ConfigError(f"sizes {list(self.ranks)}: expected numbers of ranks from 1, ascending")
        if max(self.ranks) > MOST_RANKS or len(self.ranks) > MOST_SIZES:
            raise ConfigError(
                f"{len(self.ranks)} sizes up to {max(self.ranks):,} ranks: expected at most {MOST_SIZES} sizes "
                f"of at most {MOST_RANKS:,}"
            )
        if self.global_batch < 1:
            raise ConfigError(f"global batch {self.global_batch}: expected at least 1 sample")
        if self.loader_workers < 1:
            raise ConfigError(f"loader-workers {self.loader_workers}: expected at least 1")
        if self.storage_bytes_per_second is not None and not 0 < self.storage_bytes_per_second < math.inf:
            raise ConfigError(f"storage-rate {self.storage_bytes_per_second:g}: expected more than 0")
        for rank, factor in self.slow_ranks.items():
            if not 1 <= factor <= 1000:
                raise ConfigError(f"slow rank {rank}:{factor:g}: expected a factor from 1 to 1000")
            if not 0 <= rank < self.ranks[0]:
                raise ConfigError(
                    f"slow rank {rank}: the smallest job has ranks 0 to {self.ranks[0] - 1}",
                    remedy=f"name one of them, or begin with a larger size than {self.ranks[0]} ranks",
                )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read numbers of ranks: ``64``, ``8,16,48``, or ``8..16384``: 8 and its doubles, and the last number.

    Raises `ConfigError` for anything else.
    """
    if ".." in text:
        low, _, high = text.partition("..")
        first, last = _size(low, text), _size(high, text)
        if last < first:
            raise ConfigError(f"--gpus {text}: {first} is more than {last}", remedy=f"write {last}..{first}")
        sizes = [first * 2**i for i in range(math.floor(math.log2(last / first)) + 1)]
        return tuple(sizes if sizes[-1] == last else [*sizes, last])
    return tuple(sorted({_size(each, text) for each in text.split(",")}))


def _size(word: str, text: str) -> int:
    word = word.strip()
    if not (word.isascii() and word.isdigit()) or not 1 <= int(word[:12]) <= MOST_RANKS:
        raise ConfigError(
            f"--gpus {text}: {word!r} is no number of ranks from 1 to {MOST_RANKS:,}",
            remedy="write 64, 8,16,48 or 8..16384",
        )
    return int(word)


def parse_slow_ranks(words: Sequence[str]) -> dict[int, float]:
    """Read ``3:1.5`` and the like: a rank, and by what its computing time is multiplied."""
    found: dict[int, float] = {}
    for text in words:
        number, _, factor = text.partition(":")
        try:
            value = float(factor)
        except ValueError:
            value = math.nan
        if not (number.isascii() and number.isdigit()) or not 1 <= value <= 1000:
            raise ConfigError(
                f"--slow-rank {text}: expected a rank and a factor from 1 to 1000",
                remedy="write --slow-rank 3:1.5",
            )
        if int(number) in found:
            raise ConfigError(f"--slow-rank {text}: rank {number} has a factor already", remedy="give it once")
        found[int(number)] = value
    return found


# Failures of ranks: what of the time trains, and how often to save.

RESTART_SECONDS = 300.0
"""Finding that a rank failed, starting the job again and loading: an assumption, not a measurement."""
SAVE_SECONDS = 30.0
"""For which training stops to save a checkpoint: an assumption where no disk was measured."""
_MOST_EXPONENT = 700.0


@dataclass(frozen=True)
class FailureModel:
    """How often ranks fail, and what it costs."""

    every_seconds: float
    """Mean time between two failures of `of_ranks` ranks together."""
    of_ranks: int | None = None
    """None: of the job, whatever its number of ranks."""
    restart_seconds: float = RESTART_SECONDS
    save_seconds: float = SAVE_SECONDS
    """For which training stops at each checkpoint."""
    save_every_seconds: float | None = None
    """Training between two checkpoints; None: Daly's best."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("fail-every", self.every_seconds, 0.0),
            ("checkpoint-every", self.save_every_seconds, 0.0),
            ("checkpoint-seconds", self.save_seconds, 0.0),
        ):
            if value is not None and not least < value < math.inf:
                raise ConfigError(f"{name} {value:g} s: expected a duration above 0")
        if not 0 <= self.restart_seconds < math.inf:
            raise ConfigError(f"restart {self.restart_seconds:g} s: expected a duration from 0")
        if self.of_ranks is not None and self.of_ranks < 1:
            raise ConfigError(f"fail-every: of {self.of_ranks} ranks, expected at least 1")

    def between_seconds(self, ranks: int) -> float:
        """Return the mean time between two failures of a job of `ranks`."""
        return self.every_seconds if self.of_ranks is None else self.every_seconds * self.of_ranks / ranks

    def interval_seconds(self, ranks: int) -> float:
        """Return the training between two checkpoints of a job of `ranks`."""
        if self.save_every_seconds is not None:
            return self.save_every_seconds
        return best_interval(self.save_seconds, self.between_seconds(ranks))

    def goodput(self, ranks: int) -> float:
        """Return the share of the time in which a job of `ranks` does work that it keeps, 0 to 1."""
        return goodput(
            self.interval_seconds(ranks), self.save_seconds, self.restart_seconds, self.between_seconds(ranks)
        )

    def describe(self) -> str:
        """Return who fails how often, in words."""
        every = format_seconds(self.every_seconds)
        if self.of_ranks is None:
            return f"the job fails every {every}, at every number of ranks"
        if self.of_ranks == 1:
            return f"each rank fails every {every}"
        return f"{self.of_ranks:,} ranks together fail every {every}, other numbers in proportion"


def parse_every(text: str) -> tuple[float, int | None]:
    """Read how often who fails: ``3h`` the job, ``3h/16384`` so many ranks together, ``900h/rank`` each rank.

    Raises `ConfigError` for anything else.
    """
    duration, _, who = text.partition("/")
    seconds = read_option("--fail-every", duration, parse_seconds)
    if seconds <= 0:
        raise ConfigError(f"--fail-every {text}: expected more than 0 seconds")
    if "/" not in text:
        return seconds, None
    if who.strip() in ("rank", "job"):
        return seconds, 1 if who.strip() == "rank" else None
    if not who.strip().isdigit() or int(who) < 1:
        raise ConfigError(
            f"--fail-every {text}: {who!r} is no number of ranks",
            remedy="write 3h (the job), 3h/16384 (so many ranks together) or 900h/rank (each rank)",
        )
    return seconds, int(who)


def goodput(work: float, save: float, restart: float, between: float) -> float:
    """Return the share of time that is kept work; all in seconds. See [Note: time that failures cost]."""
    exponent = (work + save) / between
    if exponent + restart / between > _MOST_EXPONENT:
        return 0.0
    return work / (between * math.exp(restart / between) * math.expm1(exponent))


def best_interval(save: float, between: float) -> float:
    """Return Daly's best training time between two checkpoints, in seconds; `between` failures, if too short."""
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(part) / 3 + part / 9) - save


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
    check({**vars(plan), **degrees.above_one()})
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

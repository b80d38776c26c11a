"""All layouts of a model on so many ranks: every division of the ranks, and what is impossible, with the reason.

[Note: why layouts are left out] A layout is left out because a rule of the product refuses it, because the model
cannot be divided so, because samples do not divide, or because tensor parallel would cross hosts, where its sums
of activations are slow: who wants it looked at fixes `tensor`. Reasons are kept by family, so that an answer can
say of each family why it is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import permutations, product
from typing import Any, NamedTuple

from ...core.cluster import Cluster
from ...core.step_model import CANDIDATES
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ...core.vocabulary.degrees import ORDER, Degrees
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.rules import (
    DEFAULT_CHUNKS,
    DEFAULT_SCHEDULE,
    MOST_ZERO,
    SCHEDULES,
    SEVERAL_STAGES,
    chunks_of,
)
from ...core.vocabulary.spec import Plan
from .. import division
from ..candidate import Candidate
from ..profile import ModelProfile
from .result import FEWER_RANKS, PRECISIONS, SearchRequest, ranks_per_host

# The keys that tune a layout without changing what a rank holds: buckets, codecs, routes.

BUCKET_BYTES = tuple(2**i for i in range(19, 27))
"""From 512 KiB to 64 MiB."""
TUNED = ("bucket_bytes", "first_bucket_bytes", "codec", "route")
"""The keys."""
ROUTES = ("auto", "flat")
"""Routes that can be fastest. The others are what "auto" takes, or for comparison."""


def settings_of(layout: SearchLayout, request: SearchRequest, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield the values of tuning keys to look at for a layout; the first are the defaults.

    Keys that are fixed are not in them. Codecs beside none are lossy, and only there if the request allows it.
    """
    yield {}
    if layout.sample_ranks * layout.context == 1:
        return
    fixed = request.fixed
    codecs = _codecs(layout, request, cluster)
    if layout.zero == MOST_ZERO:
        yield from ({"codec": codec} for codec in codecs if codec != NONE)
        return
    usual = Plan().with_bucket_bytes(on_device=not cluster.on_cpus).bucket_bytes
    sizes = [0, *(size for size in BUCKET_BYTES if size != usual and "bucket_bytes" not in fixed)]
    routes = ROUTES if "route" not in fixed and len(cluster.tiers) > 1 else ROUTES[:1]
    for codec, nbytes, route in product(codecs, sizes, routes):
        keys: dict[str, Any] = {"codec": codec, "bucket_bytes": nbytes, "route": route}
        if "first_bucket_bytes" not in fixed:
            keys["first_bucket_bytes"] = min(nbytes or usual, Plan.first_bucket_bytes)
        changed = {key: value for key, value in keys.items() if key not in fixed and value != getattr(Plan, key)}
        if changed:
            yield changed


def is_lossy(plan: Plan) -> bool:
    """Whether anything that travels under this plan is rounded, or may be."""
    return bool(plan.lossy_keys()) or (plan.codec == AUTO and plan.lossy)


def _codecs(layout: SearchLayout, request: SearchRequest, cluster: Cluster) -> list[str]:
    if "codec" in request.fixed or not request.allow_lossy or (layout.zero and not cluster.on_cpus):
        return [NONE]
    return [NONE, *(name for name in CANDIDATES if cluster.knows_codec(name) and _works(name, layout))]


def _works(codec: str, layout: SearchLayout) -> bool:
    """Whether a codec fits the stage; the plan's own checks refuse the rest."""
    spec = CodecSpec.parse(codec)
    if spec.is_exact:
        return False
    return spec.works_on_shards if layout.zero == MOST_ZERO else spec.is_quantized or not layout.zero


def fixed_is_lossy(fixed: Mapping[str, Any]) -> bool:
    """Whether keys that the user fixed ask for something lossy themselves."""
    named = [fixed.get(name, NONE) for name in ("codec", "weight_codec", "expert_codec")]
    named += dict(fixed.get("codec_for", {})).values()
    return bool(fixed.get("lossy")) or any(CodecSpec.parse(name).is_applied for name in named)


# A way to spread a model over ranks, before the keys that only tune it: buckets, codecs, routes, cuts.


class SearchLayout(NamedTuple):
    """Degrees, ZeRO stage, samples, recomputation, precision, schedule. `data` and `shard` are data parallel."""

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 0
    micro_batch: int = 1
    """Samples of one pass of a rank."""
    passes: int = 1
    """Passes of a step: `accumulate`, or `micro_batches` of a pipeline."""
    recompute: str = "none"
    precision: str = "fp32"
    schedule: str = DEFAULT_SCHEDULE
    chunks: int = 0
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.sample_ranks * self.pipeline * self.context * self.tensor

    @property
    def sample_ranks(self) -> int:
        """Ranks that train on other samples."""
        return self.data * self.shard * self.expert

    @property
    def sharing(self) -> int:
        """Ranks that share one copy of what ZeRO shards; expert ranks have the same shared parameters."""
        if not self.zero:
            return 1
        one_copy = self.shard if self.shard > 1 else self.data
        return one_copy * self.expert * self.context

    @property
    def family(self) -> str:
        """The kind of plan that this is, such as ``ZeRO-3 x tensor``."""
        parts = []
        if self.zero == MOST_ZERO and self.shard > 1 and self.data > 1:
            parts.append("hybrid ZeRO-3")
        elif self.zero:
            parts.append(f"ZeRO-{self.zero}")
        elif self.data > 1:
            parts.append("data")
        parts += [name for name in ("tensor", "pipeline", "expert", "context") if getattr(self, name) > 1]
        return " x ".join(parts) or "one rank"

    def to_candidate(self, fixed: Mapping[str, Any], **tuned: Any) -> Candidate:
        """Return the plan with these keys, the `fixed` and the `tuned` ones; raise `PlanError` if there is none.

        A plan that this returns is one that the product's own checks of combinations accept.
        """
        keys = self._asdict()
        for name in ("micro_batch", "passes", "schedule", "chunks"):
            del keys[name]
        keys["precision"] = "bf16" if self.precision == "bf16-weights" else self.precision
        keys["bf16_parameters"] = self.precision == "bf16-weights"
        if self.pipeline > 1:
            keys |= {"schedule": self.schedule, "micro_batches": self.passes}
            if self.schedule == "interleaved":
                keys["chunks"] = self.chunks
        elif fixed.get("micro_batches", 0) > 1:
            keys["micro_batches"] = self.passes
        else:
            keys["accumulate"] = self.passes
        keys |= fixed
        if self.tensor == 1:
            keys.pop("tensor_recipe", None)  # it says how layers would be divided, and not that they are
        plan = Plan(**{**keys, **tuned})  # which knows all degrees
        return Candidate(plan, self.ranks, self.micro_batch * self.passes * self.sample_ranks)

    @property
    def degrees(self) -> Degrees:
        """The mesh."""
        return Degrees(self.pipeline, self.data, self.shard, self.expert, self.context, self.tensor)


_VALUES: dict[str, tuple[Any, ...]] = {
    "zero": tuple(range(MOST_ZERO + 1)), "recompute": ("none", "blocks"), "precision": PRECISIONS,
}  # fmt: skip


def neighbours(layout: SearchLayout) -> Iterator[SearchLayout]:
    """Yield layouts that differ in one thing by a factor of two or by another value; not all of them can be."""
    for more, less in ((1, 2), (2, 1)):
        yield layout._replace(micro_batch=layout.micro_batch * more // less, passes=layout.passes * less // more)
    for name, values in _VALUES.items():
        yield from (layout._replace(**{name: value}) for value in values if value != getattr(layout, name))
    for schedule, chunks in product(SCHEDULES, (0, DEFAULT_CHUNKS, 2 * DEFAULT_CHUNKS)):
        if (schedule, chunks) != (layout.schedule, layout.chunks):
            yield layout._replace(schedule=schedule, chunks=chunks)
    for down, up in permutations(ORDER, 2):
        if getattr(layout, down) % 2:
            continue
        moved = layout._replace(**{down: getattr(layout, down) // 2, up: getattr(layout, up) * 2})
        samples = layout.micro_batch * layout.passes * layout.sample_ranks // moved.sample_ranks
        for micro_batch, by_tokens in product({layout.micro_batch, samples // layout.passes, 1}, (False, True)):
            if micro_batch:
                passes = samples // micro_batch
                yield moved._replace(micro_batch=micro_batch, passes=passes, sequence_parallel=by_tokens)


MOST_CHUNKS = 4
MOST_MICRO_BATCHES = 512
"""A pipeline has no more: that would make the bubble no smaller to speak of, and an answer slow."""


class Space:
    """The layouts of a request. Iterate once; afterwards `reasons` says what is not there."""

    def __init__(self, profile: ModelProfile, request: SearchRequest, cluster: Cluster) -> None:
        self._profile, self._request, self._cluster = profile, request, cluster
        self.reasons: dict[str, dict[str, int]] = {}
        """By family: why layouts are not there, and how many."""
        self._allowed: dict[tuple[Any, ...], str] = {}

    def __iter__(self) -> Iterator[tuple[SearchLayout, list[SearchLayout]]]:
        """Yield every division of the ranks, with its layouts: samples, recomputation, precision, schedule."""
        for ranks in self._rank_counts():
            for base in self._on(ranks):
                yield base, list(self._passes(base))

    def _rank_counts(self) -> Sequence[int]:
        whole = self._request.ranks
        if self._request.goal not in FEWER_RANKS:
            return [whole]
        powers = {2**i for i in range(whole.bit_length())}
        return sorted({count for count in {*divisors(whole), *powers} if count <= whole}, reverse=True)

    def _on(self, ranks: int) -> Iterator[SearchLayout]:
        for tensor, context, expert, pipeline in self._divisions(ranks):
            rest = ranks // (tensor * context * expert * pipeline)
            for data, shard, zero in self._copies(rest):
                base = SearchLayout(
                    pipeline, data, shard, expert, context, tensor, zero,
                    sequence_parallel=self._divides_tokens(tensor, context),
                )  # fmt: skip
                reason = self._why_not(base)
                if reason:
                    self._leave_out(base, reason)
                    continue
                yield base

    def _divisions(self, ranks: int) -> Iterator[tuple[int, int, int, int]]:
        for tensor in self._sizes("tensor", ranks):
            for context in self._sizes("context", ranks // tensor):
                for expert in self._sizes("expert", ranks // (tensor * context)):
                    for pipeline in self._sizes("pipeline", ranks // (tensor * context * expert)):
                        yield tensor, context, expert, pipeline

    def _sizes(self, name: str, ranks: int) -> Sequence[int]:
        fixed = self._request.fixed.get(name)
        if fixed is None:
            return divisors(ranks)
        return [fixed] if ranks % fixed == 0 else []

    def _copies(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Yield (data, shard, stage) of so many data-parallel ranks."""
        fixed = self._request.fixed
        for zero in _listed(fixed.get("zero"), range(MOST_ZERO + 1)):
            if zero and ranks == 1 and "zero" not in fixed:
                continue
            shards = [fixed["shard"]] if "shard" in fixed else [1]
            if zero == MOST_ZERO and "shard" not in fixed and fixed.get("shard_within") != "host":
                shards += [each for each in divisors(ranks) if 1 < each < ranks]
            for shard in shards:
                if ranks % shard == 0 and fixed.get("data", ranks // shard) == ranks // shard:
                    yield ranks // shard, shard, zero

    def _why_not(self, base: SearchLayout) -> str:
        """Return why a model cannot be divided so; empty: it can."""
        profile = self._profile
        kind = self._request.fixed.get("context_kind", Plan.context_kind)
        return (
            division.of_tensor(profile, base.tensor)
            or self._of_hosts(base.tensor)
            or division.of_experts(profile, base.expert)
            or division.of_sequences(profile, base.context, base.tensor, kind)
            or (division.of_tokens(profile, base.tensor, base.context) if base.sequence_parallel else "")
            or division.of_stages(profile, base.pipeline)
            or division.of_shards(profile, base.zero, base.pipeline)
            or self._of_device(base.zero)
            or self._of_samples(base)
        )

    def _divides_tokens(self, tensor: int, context: int) -> bool:
        """Whether ranks divide the tokens outside of layers, too: wherever that can be."""
        can = (
            tensor > 1
            and division.may_divide_tokens(self._profile)
            and not division.of_tokens(self._profile, tensor, context)
        )
        return bool(self._request.fixed.get("sequence_parallel", can))

    def _of_hosts(self, degree: int) -> str:
        inside = ranks_per_host(self._cluster)
        if degree > inside and "tensor" not in self._request.fixed:
            return f"tensor = {degree} would cross hosts of {inside} ranks (fix it to have it looked at)"
        return ""

    def _of_device(self, zero: int) -> str:
        if self._cluster.on_cpus:
            return ""
        if 0 < zero < MOST_ZERO:
            return f"ZeRO-{zero} takes tensors in the memory of a CPU"
        fixed = self._request.fixed
        codecs = [fixed.get("codec", NONE), *dict(fixed.get("codec_for", {})).values()]
        for codec in map(CodecSpec.parse, codecs):
            if not codec.is_exact and not self._cluster.knows_codec(codec.to_text()):
                return f"how fast {codec.to_text()} is on an accelerator is not known from a measurement"
        unknown = [name for name in ("codec", "weight_codec") if zero and fixed.get(name, NONE) != NONE]
        return f"how fast {unknown[0]} is at ZeRO-{zero} on an accelerator is not known" if unknown else ""

    def _of_samples(self, base: SearchLayout) -> str:
        batch, ranks, passes = self._request.global_batch, base.sample_ranks, self._are_fixed(base) or 1
        if batch % ranks:
            return f"a global batch of {batch} samples does not divide over {ranks} ranks"
        if batch // ranks % passes:
            return f"{batch // ranks} samples of a rank do not divide into {passes} passes"
        return ""

    def _passes(self, base: SearchLayout) -> Iterator[SearchLayout]:
        samples = self._request.global_batch // base.sample_ranks
        schedules = list(self._schedules(base.pipeline)) if base.pipeline > 1 else [(base.schedule, 0)]
        wanted = self._are_fixed(base)
        options = list(product(self._recomputations(), self._precisions(), schedules))
        for micro_batch in reversed(divisors(samples)):
            passes = samples // micro_batch
            if wanted and passes != wanted:
                continue
            if base.pipeline > 1 and passes > MOST_MICRO_BATCHES and not wanted:
                self._leave_out(base, f"more than {MOST_MICRO_BATCHES} micro-batches are not looked at")
                continue
            for recompute, precision, (schedule, chunks) in options:
                if schedule == "interleaved" and passes % base.pipeline:
                    continue
                layout = base._replace(
                    micro_batch=micro_batch, passes=passes, recompute=recompute, precision=precision,
                    schedule=schedule, chunks=chunks,
                )  # fmt: skip
                reason = self._refused(layout)
                if reason:
                    self._leave_out(base, reason)
                else:
                    yield layout

    def _are_fixed(self, base: SearchLayout) -> int:
        """Return the passes that the user gives; 0: any."""
        fixed = self._request.fixed
        wanted: int = fixed.get("micro_batches", 0)
        if base.pipeline > 1 or wanted > 1:
            return wanted
        return int(fixed.get("accumulate", 0))

    def _recomputations(self) -> Sequence[Any]:
        if "recompute" in self._request.fixed:
            return [self._request.fixed["recompute"]]
        return ["none", "blocks"] if self._profile.blocks else ["none"]

    def _precisions(self) -> Sequence[str]:
        fixed = self._request.fixed
        if "precision" not in fixed:
            return list(dict.fromkeys(self._request.precisions))
        return ["bf16-weights" if fixed.get("bf16_parameters") else fixed["precision"]]

    def _schedules(self, pipeline: int) -> Iterator[tuple[str, int]]:
        fixed = self._request.fixed
        for schedule in _listed(fixed.get("schedule"), SCHEDULES):
            chunks = [DEFAULT_CHUNKS, MOST_CHUNKS] if schedule == "interleaved" else [0]
            for each in _listed(fixed.get("chunks") or None, chunks):
                stages = pipeline * chunks_of(schedule, each)
                if schedule in SEVERAL_STAGES and stages > division.layers_of(self._profile):
                    continue
                yield schedule, each

    def _refused(self, layout: SearchLayout) -> str:
        """Return what the product's rules, or the model, say against a layout: for kinds, not for sizes."""
        kind = (
            layout.pipeline > 1, layout.expert > 1, layout.context > 1, layout.tensor > 1, layout.zero,
            layout.data > 1, layout.shard > 1, layout.schedule, layout.recompute, layout.precision,
            layout.passes > 1, layout.sequence_parallel,
        )  # fmt: skip
        if kind not in self._allowed:
            try:
                layout.to_candidate(self._request.fixed)
                self._allowed[kind] = ""
            except PlanError as problem:
                self._allowed[kind] = problem.message.removeprefix("plan: ")
            if self._profile.fails_in(layout.precision, layout.recompute):
                self._allowed[kind] = f"its pass fails in {layout.precision}, recompute = {layout.recompute!r}"
        return self._allowed[kind]

    def _leave_out(self, base: SearchLayout, reason: str) -> None:
        counts = self.reasons.setdefault(base.family, {})
        counts[reason] = counts.get(reason, 0) + 1


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def _listed(fixed: Any, default: Any) -> Sequence[Any]:
    return list(default) if fixed is None else [fixed]

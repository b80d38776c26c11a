"""A way to spread a model over ranks, before the keys that only tune it: buckets, codecs, routes, cuts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations, product
from typing import Any, NamedTuple

from ...core.vocabulary.degrees import ORDER, Degrees
from ...core.vocabulary.schedule_names import DEFAULT_CHUNKS, DEFAULT_SCHEDULE, SCHEDULES
from ...core.vocabulary.spec import MOST_ZERO, Plan
from ..candidate import Candidate
from ..combinations import refuse_codecs_of_rows, refuse_combinations
from .request import PRECISIONS


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
        plan = Plan(**{**keys, **tuned})
        refuse_combinations(plan, self.degrees)
        refuse_codecs_of_rows(plan)
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

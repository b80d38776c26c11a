"""The gradients of a stage in buckets, as the reducer makes them: bytes, codecs, and when backward has each.

[Note: bytes of a bucket] Every gradient begins on a cache line. A bucket without a codec ends with one element for
each of its parameters (whether it was used) and eight that say how many steps were made; one with a codec is a
multiple of 1,024 elements a rank. With ZeRO a bucket has a block of rows for each rank, each with such an end.

[Note: replaying a table] The recurrence of `core.step_model`, e(i) = max(ready(i), e(i - 1)) + t(i), is
max over j of (ready(j) + t(j) + ... + t(last)). So a thousand buckets take one pass over arrays. A test compares
both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...core.bucket_plan import CHUNK_BYTES, plan_buckets
from ...core.link import LinkModel
from ...core.step_model import BucketLoad, Replay
from ...core.vocabulary.codec_spec import EXACT, CodecSpec, low_rank_pays
from ...core.vocabulary.rules import MOST_ZERO
from ...core.vocabulary.spec import USUAL_BUCKET_BYTES, Plan
from ..profile import ModelProfile, UnitGradient
from .layout import RunLayout, divided_gradients
from .stages import StageUnits
from .units import divides

# The buckets of a stage as a table: equal ones are counted, and all are replayed at once.


@dataclass(frozen=True)
class BucketKind:
    """Gradients that travel together."""

    nbytes: int
    """As it travels, with its end."""
    gradient_bytes: int
    codec: str
    sent_ratio: float
    """Bytes that its codec sends over those of the exact exchange; by the codec's formula."""
    place: int = 0
    """Position of the unit of its last gradient in the stage, in the order of backward."""
    progress: float = 0.0
    """How many units of this place backward has passed when it is ready."""
    starts: int = 1
    """How often its codec begins: for each matrix, if it is one of matrices."""

    def kind(self) -> BucketKind:
        """Return what equal buckets have in common."""
        return replace(self, place=0, progress=0.0)


@dataclass(frozen=True)
class BucketTable:
    """Buckets in the order in which they leave."""

    kinds: tuple[BucketKind, ...]
    counts: tuple[int, ...]
    """How many there are of each kind."""
    kind_of: np.ndarray[Any, np.dtype[np.int64]]
    """By bucket."""
    places: np.ndarray[Any, np.dtype[np.int64]]
    progress: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, buckets: Sequence[BucketKind]) -> BucketTable:
        """Return the table of `buckets`."""
        kinds = Counter(each.kind() for each in buckets)
        number = {kind: i for i, kind in enumerate(kinds)}
        return cls(
            tuple(kinds),
            tuple(kinds.values()),
            np.array([number[each.kind()] for each in buckets], dtype=np.int64),
            np.array([each.place for each in buckets], dtype=np.int64),
            np.array([each.progress for each in buckets], dtype=np.float64),
        )

    def __iter__(self) -> Iterator[BucketKind]:
        """The buckets, in the order in which they leave."""
        for number, place, progress in zip(self.kind_of, self.places, self.progress, strict=True):
            kind = self.kinds[int(number)]
            yield replace(kind, place=int(place), progress=float(progress))

    def replay(
        self, loads: Sequence[BucketLoad], begins: Sequence[float], each: Sequence[float], link: LinkModel, *,
        slow: float, shares_core: bool,
    ) -> Replay:  # fmt: skip
        """Return when the last bucket has arrived. See [Note: replaying a table].

        Args:
            loads: what buckets of each kind need; when they are ready is not asked.
            begins: when backward reaches each place.
            each: what one unit of a place takes.
            link: while the ranks compute.
            slow: by how much backward takes longer while buckets are on their way.
            shares_core: whether codecs take their time from backward.
        """
        alone = np.asarray(begins)[self.places] + self.progress * np.asarray(each)[self.places]
        taken = np.array([load.intra_host_seconds + load.on_link(link) for load in loads])[self.kind_of]
        ready = alone + (slow - 1.0) * np.minimum(alone, np.cumsum(taken) - taken)
        cpu = np.array([load.cpu_seconds + load.intra_host_seconds for load in loads])[self.kind_of]
        if shares_core:
            ready += np.cumsum(cpu) - cpu
        behind = np.cumsum(taken[::-1])[::-1]
        end = float((ready + behind).max()) + loads[int(self.kind_of[-1])].decode_seconds
        return Replay(end, float(cpu.sum()))


CACHE_LINE_BYTES = 64
MARKS = 8
"""Elements behind the gradients of a bucket that say how many steps a rank has made."""
_CODED_MULTIPLE = 1024
_LEAST_CODED = 4096
"""Elements from which a matrix may have a codec."""


class LocalGradient(NamedTuple):
    """A gradient on one rank, and when backward has it."""

    name: str
    rows: int
    columns: int
    element_bytes: int
    codec: str
    is_coded: bool
    place: int
    """Position of its unit in the stage, in the order of backward."""
    progress: float
    """How many units of this place backward has passed when it is ready."""

    @property
    def elements(self) -> int:
        """Their number."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.elements * self.element_bytes


def codec_of(gradient: UnitGradient, rows: int, columns: int, plan: Plan, width: float) -> CodecSpec:
    """Return the codec of a gradient: as the reducer chooses it."""
    pattern = next((each for each in reversed(list(plan.codec_for)) if fnmatchcase(gradient.name, each)), None)
    spec = CodecSpec.parse(plan.codec if pattern is None else plan.codec_for[pattern])
    if not spec.is_applied or gradient.element_bytes * width != 4:
        return EXACT
    if gradient.columns < 2 or rows * columns < _LEAST_CODED:
        return EXACT
    if spec.is_low_rank and not low_rank_pays(rows, columns, spec.rank):
        return EXACT
    return spec


def local_gradients(
    profile: ModelProfile, stage: StageUnits, layout: RunLayout, *, experts: bool
) -> list[LocalGradient]:
    """Return the gradients of a stage in the order of backward: of experts that are divided, or all others."""
    found = []
    tensor, expert, width = layout.degrees.tensor, layout.degrees.expert, layout.gradient_width
    for place, (index, count) in enumerate(reversed(stage.units)):
        unit = profile.units[index]
        ways = divided_gradients(unit)
        is_split = divides(unit, layout) is not None
        sizes = [each.nbytes for each in unit.gradients]
        whole, one, so_far = sum(sizes) or 1, [], 0
        for gradient, way, size in zip(unit.gradients, ways, sizes, strict=True):
            so_far += size
            rows, columns = gradient.rows, gradient.columns
            if way == "tensor" and is_split:
                rows, columns = (-(-rows // tensor), columns) if rows % tensor == 0 else (rows, columns // tensor)
            if way == "expert" and expert > 1:
                rows = -(-rows // expert)
            if (way == "expert" and expert > 1) != experts:
                continue
            spec = EXACT if experts else codec_of(gradient, rows, columns, layout.plan, width)
            element = round(gradient.element_bytes * width)
            one.append((gradient.name, rows, columns, element, spec.to_text(), not spec.is_exact, so_far / whole))
        for number in range(count):
            found += [LocalGradient(*each[:6], place, number + each[6]) for each in one]
    return found


def buckets_of(gradients: Sequence[LocalGradient], layout: RunLayout, ranks: int) -> list[BucketKind]:
    """Return the buckets of `gradients`, which `ranks` exchange, in the order in which they leave."""
    plan = layout.plan
    is_sharded = plan.zero in (1, 2)
    planned = plan_buckets(
        gradients,
        key=lambda each: (each.element_bytes, each.codec),
        first_bytes=plan.first_bucket_bytes,
        limit_bytes=plan.bucket_bytes or USUAL_BUCKET_BYTES,
    )
    return [_bucket(members, ranks, is_sharded=is_sharded) for members in planned]


def _bucket(members: Sequence[LocalGradient], ranks: int, *, is_sharded: bool) -> BucketKind:
    last, element = members[-1], members[0].element_bytes
    spec = _spec(members[0].codec)
    whole = sum(each.nbytes for each in members)
    if is_sharded:
        nbytes = ranks * block_elements(members, ranks, tail=len(members) + MARKS) * element
    elif members[0].is_coded:
        nbytes = -(-_aligned(members) // (_CODED_MULTIPLE * ranks)) * _CODED_MULTIPLE * ranks * element
    else:
        nbytes = (_aligned(members) + len(members) + MARKS) * element
    ratio = 1.0
    if members[0].is_coded:
        sent = sum((spec.bytes_per_element(m.rows, m.columns, ranks=ranks) or 4.0) * m.elements for m in members)
        ratio = sent / whole
    starts = len(members) if spec.is_low_rank else 1
    return BucketKind(nbytes, whole, members[0].codec, ratio, last.place, last.progress, starts)


@lru_cache(maxsize=64)
def _spec(text: str) -> CodecSpec:
    return CodecSpec.parse(text)


def _aligned(members: Sequence[LocalGradient]) -> int:
    """Return the elements of gradients that each begin on a cache line."""
    line = max(1, CACHE_LINE_BYTES // members[0].element_bytes)
    elements = 0
    for each in members:
        elements = _up(elements, line) + each.elements
    return elements


def _up(value: int, unit: int) -> int:
    """Return the next multiple of `unit`."""
    return -(-value // unit) * unit


def block_elements(members: Sequence[LocalGradient], ranks: int, *, tail: int) -> int:
    """Return the elements of one rank's block of rows, which are as `torch.chunk` divides them."""
    line = max(1, CACHE_LINE_BYTES // members[0].element_bytes)
    longest = sum(_up(_up(each.rows, ranks) // ranks * each.columns, line) for each in members)
    return _up(longest + tail, line)


def gather_chunks(gradients: Sequence[LocalGradient]) -> list[list[LocalGradient]]:
    """Return the parameters that are gathered together after a step at stages 1 and 2, in the model's order."""
    found: list[list[LocalGradient]] = []
    for kind in dict.fromkeys(each.element_bytes for each in gradients):
        nbytes = CHUNK_BYTES
        for each in (one for one in reversed(gradients) if one.element_bytes == kind):
            if nbytes + each.nbytes > CHUNK_BYTES:
                found.append([])
                nbytes = 0
            found[-1].append(each)
            nbytes += each.nbytes
    return found


@dataclass(frozen=True)
class StageGradients:
    """The gradients of a stage on one rank, and their buckets."""

    shared: tuple[LocalGradient, ...]
    """That all data-parallel ranks have."""
    experts: tuple[LocalGradient, ...]
    """Experts that are divided."""
    buckets: BucketTable
    expert_buckets: BucketTable
    chunks: Mapping[tuple[int, int], int]
    """Parameters that are gathered after a step, by bytes of all ranks' rows and of an element: how many."""

    @cached_property
    def elements(self) -> int:
        """The bytes of `shared`."""
        return sum(each.elements for each in self.shared)

    @cached_property
    def expert_elements(self) -> int:
        """The bytes of `experts`."""
        return sum(each.elements for each in self.experts)

    @cached_property
    def coded_elements(self) -> int:
        """Gradients with a codec."""
        return sum(each.elements for each in self.shared if each.is_coded)


def stage_gradients(profile: ModelProfile, stage: StageUnits, layout: RunLayout) -> StageGradients:
    """Return the gradients of a stage, and the buckets that data-parallel ranks exchange."""
    shared = local_gradients(profile, stage, layout, experts=False)
    experts = local_gradients(profile, stage, layout, experts=True)
    has_buckets, ranks = layout.plan.zero < MOST_ZERO, layout.replicas
    chunks: Counter[tuple[int, int]] = Counter()
    for chunk in gather_chunks(shared) if layout.plan.zero in (1, 2) else ():
        element = chunk[0].element_bytes
        chunks[ranks * block_elements(chunk, ranks, tail=0) * element, element] += 1
    return StageGradients(
        tuple(shared),
        tuple(experts),
        BucketTable.of(buckets_of(shared, layout, ranks) if has_buckets else ()),
        BucketTable.of(buckets_of(experts, layout, layout.expert_replicas)),
        chunks,
    )

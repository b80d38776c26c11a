"""The gradients of a stage in buckets, as the reducer makes them: bytes, codecs, and when backward has each.

[Note: bytes of a bucket] Every gradient begins on a cache line. A bucket without a codec ends with one element for
each of its parameters (whether it was used) and eight that say how many steps were made; one with a codec is a
multiple of 1,024 elements a rank. With ZeRO a bucket has a block of rows for each rank, each with such an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import NamedTuple

from ...core.step_model.bucket_plan import plan_buckets
from ...core.step_model.row_regions import CHUNK_BYTES
from ...core.vocabulary.codec_spec import EXACT, CodecSpec, low_rank_pays
from ...core.vocabulary.spec import MOST_ZERO, USUAL_BUCKET_BYTES, Plan
from ..model.profile import ModelProfile, UnitGradient
from .bucket_table import BucketKind, BucketTable
from .divided import divided_gradients
from .layout import RunLayout
from .stages import StageUnits
from .units import divides

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

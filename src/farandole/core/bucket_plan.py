"""Which gradients share a bucket: one rule for the reducer, which builds buckets, and for predictions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from .vocabulary.codec_spec import NONE
from .vocabulary.spec import Plan, RouteName
from .vocabulary.units import format_bytes

# Memory that is used in turn: by rows that ZeRO stages 1 and 2 exchange, and by states that lie on a disk.
#
# One definition for what allocates it, and for the estimate of memory, which counts it.

CHUNK_BYTES = 4 * 2**20
"""Parameters that travel together after the optimizer's step, side by side; a larger one is alone."""
GATHER_REGIONS = 2
"""Two at least: a rank writes a region again after it has met the others at the other one."""
LARGE_REGION_BYTES = 8 * 2**20
STATE_CHUNK_BYTES = 16 * 2**20
"""States of a file that are in use at once, or those of one parameter."""


def sum_regions(largest_bytes: int) -> int:
    """Return how many buckets of gradients are on their way at once at stage 2; the largest has so many bytes."""
    return 2 if largest_bytes > LARGE_REGION_BYTES else 3


def gather_bytes(trainable_bytes: int, largest_tensor_bytes: int) -> int:
    """Return the bytes of the regions in which parameters travel, at stages 1 and 2."""
    return GATHER_REGIONS * min(trainable_bytes, max(CHUNK_BYTES, largest_tensor_bytes))


def disk_state_bytes(state_bytes: float, largest_bytes: float) -> int:
    """Return what states on a disk take of memory: the chunk in use and the next one.

    Args:
        state_bytes: of all of a rank's states.
        largest_bytes: of those of its largest parameter.
    """
    return round(min(state_bytes, 2 * max(STATE_CHUNK_BYTES, largest_bytes)))


# The keys of a plan that say how gradients are made and travel, and that may change between two steps.


@dataclass(frozen=True)
class ExchangeKeys:
    """How gradients travel, and in how many passes they are made. The fields are keys of `Plan`; see `of_plan`."""

    bucket_bytes: int
    first_bucket_bytes: int
    codec: str
    route: RouteName
    connections: int
    micro_batches: int
    """Parts of a batch of `fd.step`; 1: it is not divided."""

    @classmethod
    def of_plan(cls, plan: Plan, route: RouteName) -> ExchangeKeys:
        """Return the keys of `plan`, in a world that chose `route`; a default number of micro-batches is 1."""
        parts = plan.micro_batches or 1
        return cls(plan.bucket_bytes, plan.first_bucket_bytes, plan.codec, route, plan.connections, parts)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ExchangeKeys:
        """Return what `to_mapping` was of. Raises TypeError or KeyError for anything else."""
        keys = cls(**values)
        for name, value in asdict(keys).items():
            kind = str if name in ("codec", "route") else int
            if type(value) is not kind:
                raise TypeError(f"{name} = {value!r} is no {kind.__name__}")
        return keys

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def on(self, plan: Plan) -> Plan:
        """Return `plan` with these keys. Raises `PlanError` where they contradict its others."""
        is_same = self.micro_batches == (plan.micro_batches or 1)
        return replace(
            plan, **{**asdict(self), "micro_batches": plan.micro_batches if is_same else self.micro_batches}
        )

    def to_text(self, other: ExchangeKeys | None = None) -> str:
        """Return the keys for people; with `other`, only those that are different there."""
        mine = asdict(self)
        names = [name for name in mine if other is None or mine[name] != getattr(other, name)]
        shown = {name: format_bytes(mine[name]) if name.endswith("_bytes") else str(mine[name]) for name in names}
        return ", ".join(f"{name} {value}" for name, value in shown.items()) or "unchanged"


class Sized(Protocol):
    """What goes into a bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes, uncompressed."""


Item = TypeVar("Item", bound=Sized)


@dataclass(frozen=True)
class BucketPlan:
    """How the gradients of a step are divided into buckets, and which codec each bucket has."""

    codecs: Mapping[str, str]
    """Text of the codec by parameter name; ``none`` for a parameter that is not in it."""
    bucket_bytes: int
    """The most bytes of a bucket, uncompressed."""
    first_bucket_bytes: int | None = None
    """The most bytes of the first bucket: a smaller one leaves earlier. None: as the others."""

    def codec_of(self, name: str) -> str:
        """Return the codec of a parameter."""
        return self.codecs.get(name, NONE)


def plan_buckets(
    items: Sequence[Item], *, key: Callable[[Item], Hashable], first_bytes: int, limit_bytes: int
) -> list[list[Item]]:
    """Divide `items`, given in the order in which gradients become ready, into buckets.

    Items of one bucket have the same key (dtype, device, codec); a key of None makes a bucket of its own. A bucket
    is closed when the next item would make it larger than `limit_bytes` (the first: `first_bytes`), so a larger
    item is alone. Several keys are open at a time. Buckets come in the order in which their last item is ready,
    which is the order to launch them in. This is DDP's assignment by size, Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
    """
    closed: list[tuple[int, list[Item]]] = []
    open_buckets: dict[Hashable, tuple[int, int, list[Item]]] = {}  # key -> last position, bytes, items
    for position, item in enumerate(items):
        group = key(item)
        if group is None:
            closed.append((position, [item]))
            continue
        last, nbytes, members = open_buckets.get(group, (position, 0, []))
        if members and nbytes + item.nbytes > (limit_bytes if closed else first_bytes):
            closed.append((last, members))
            nbytes, members = 0, []
        members.append(item)
        open_buckets[group] = (position, nbytes + item.nbytes, members)
    closed += [(last, members) for last, _, members in open_buckets.values()]
    return [members for _, members in sorted(closed, key=lambda bucket: bucket[0])]

"""The degrees of parallelism: how the ranks of a job form a mesh, and where each rank is in it.

[Note: order of ranks] Ranks are numbered so that the last degree changes fastest. The ones that talk most come
last, so that their ranks are neighbours on one host: tensor ranks talk in every layer, context ranks in every
attention, expert ranks in some layers, shard and data ranks once a step, and pipeline stages send
activations alone.

>>> Degrees(pipeline=2, tensor=2).members(3, ["pipeline"])
(1, 3)
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from .errors import PlanError

ORDER: Final = ("pipeline", "data", "shard", "expert", "context", "tensor")
"""From outermost to innermost. See [Note: order of ranks]."""
OTHER_SAMPLES: Final = ("data", "shard", "expert")
"""Ranks that differ in one of these train on other samples."""
SAME_SAMPLES: Final = ("pipeline", "context", "tensor")
"""Ranks that differ in these alone train on the same."""
SAME_PARAMETERS: Final = (*OTHER_SAMPLES, "context")
"""Ranks that differ in these alone hold the same parameters, but for those of experts."""
REST: Final = "rest"
EQUAL: Final = "none"
SPEED: Final = "speed"
"""Values of `balance`: equal shares of a batch, and measured ones."""
Degree = int | Literal["rest"]


class HasDegrees(Protocol):
    """What a plan says of degrees."""

    @property
    def zero(self) -> int:
        """See `Plan`."""

    @property
    def data(self) -> Degree:
        """See `Plan`."""

    @property
    def shard(self) -> Degree:
        """See `Plan`."""

    @property
    def tensor(self) -> Degree:
        """See `Plan`."""

    @property
    def pipeline(self) -> Degree:
        """See `Plan`."""

    @property
    def expert(self) -> Degree:
        """See `Plan`."""

    @property
    def context(self) -> Degree:
        """See `Plan`."""


@dataclass(frozen=True)
class Degrees:
    """The size of the mesh in each dimension; their product is the number of ranks."""

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.size_over(ORDER)

    @property
    def is_data_alone(self) -> bool:
        """Whether every rank holds the whole model and trains on samples of its own."""
        return self.size == self.data * self.shard

    def size_over(self, names: Collection[str]) -> int:
        """Return the number of ranks that differ in the degrees `names` alone."""
        size = 1
        for name in names:
            size *= getattr(self, name)
        return size

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` in each degree."""
        found = {}
        for name in reversed(ORDER):
            rank, found[name] = divmod(rank, getattr(self, name))
        return found

    def rank_over(self, rank: int, names: Collection[str]) -> int:
        """Return the place of `rank` among those that differ from it in the degrees `names` alone."""
        return self.members(rank, names).index(rank % self.size)  # beyond: one that is alone, `World.is_apart`

    def members(self, rank: int, names: Collection[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` in the degrees `names` alone, itself included, in order."""
        mine = self.place(rank)
        fixed = [name for name in ORDER if name not in names]
        places = ((other, self.place(other)) for other in range(self.size))
        return tuple(other for other, place in places if all(place[name] == mine[name] for name in fixed))

    def first_ranks(self, names: Collection[str]) -> list[int]:
        """Return the first of the ranks that differ in the degrees `names` alone, of each such group."""
        return [rank for rank in range(self.size) if not any(self.place(rank)[name] for name in names)]

    def above_one(self) -> dict[str, int]:
        """Return the degrees above 1, in order."""
        return {name: getattr(self, name) for name in ORDER if getattr(self, name) > 1}

    def __str__(self) -> str:
        """The degrees above 1, such as ``data 2 x tensor 4``."""
        return " x ".join(f"{name} {size}" for name, size in self.above_one().items()) or "data 1"


class MeshPlace:
    """The place of one rank. Without degrees in the plan all ranks are data parallel."""

    rank: int
    size: int

    @property
    def degrees(self) -> Degrees:
        """The mesh that all ranks of the job form."""
        raise NotImplementedError

    @property
    def data_rank(self) -> int:
        """Which replica this rank is of, among those that share no shards."""
        return self._at("data")

    @property
    def data_size(self) -> int:
        """The number of replicas."""
        return self.degrees.data

    @property
    def shard_rank(self) -> int:
        """Which shard of parameters, gradients or states this rank has."""
        return self._at("shard")

    @property
    def shard_size(self) -> int:
        """The number of shards."""
        return self.degrees.shard

    @property
    def tensor_rank(self) -> int:
        """Which slice of each split layer this rank has."""
        return self._at("tensor")

    @property
    def tensor_size(self) -> int:
        """The number of slices of split layers."""
        return self.degrees.tensor

    @property
    def pipeline_rank(self) -> int:
        """Which rank of its pipeline this is; the first has the model's input."""
        return self._at("pipeline")

    @property
    def pipeline_size(self) -> int:
        """The number of ranks in a pipeline."""
        return self.degrees.pipeline

    @property
    def expert_rank(self) -> int:
        """Which experts of each layer this rank has."""
        return self._at("expert")

    @property
    def expert_size(self) -> int:
        """The number of ranks that divide the experts of a layer."""
        return self.degrees.expert

    @property
    def context_rank(self) -> int:
        """Which part of each sequence this rank has."""
        return self._at("context")

    @property
    def context_size(self) -> int:
        """The number of parts of a sequence."""
        return self.degrees.context

    @property
    def sample_rank(self) -> int:
        """Which share of each global batch this rank trains on."""
        return self.degrees.rank_over(self.rank, OTHER_SAMPLES)

    @property
    def sample_size(self) -> int:
        """The number of shares of a global batch."""
        return self.degrees.size_over(OTHER_SAMPLES)

    def _at(self, name: str) -> int:
        return self.degrees.place(self.rank)[name]


def degrees_of(plan: HasDegrees, size: int) -> Degrees:
    """Return the mesh that `plan` makes of `size` ranks.

    A degree of "rest" is what the others leave; `data` is, unless another one is said to be the rest.

    Raises:
        PlanError: the product of the degrees is not `size`; two degrees are the rest.
    """
    said: dict[str, Degree] = {name: getattr(plan, name) for name in ORDER}
    rest = [name for name, value in said.items() if value == REST]
    if len(rest) > 1 and "data" in rest:
        rest.remove("data")
        said["data"] = 1
    if len(rest) > 1:
        raise PlanError(
            f'plan: {" and ".join(rest)} are both "rest"', remedy="say of one of them how many ranks it has"
        )
    sizes = {name: int(value) for name, value in said.items() if value != REST}
    product = 1
    for value in sizes.values():
        product *= value
    written = " x ".join(f"{name} {value}" for name, value in sizes.items() if value > 1) or "1"
    if rest:
        if size % product:
            raise PlanError(
                f"plan: {written} needs a multiple of {product} ranks, but there are {size}",
                remedy=f"start {max(product, size // product * product)} ranks, or change the degrees",
            )
        sizes[rest[0]] = size // product
    elif product != size:
        raise PlanError(
            f"plan: {written} is {product} ranks, but there are {size}",
            remedy=f'start {product} ranks, or leave one degree to the others: data = "rest"',
        )
    return Degrees(**sizes)


def refuse_shares(balance: str, sample_size: int) -> None:
    """Raise `PlanError` for a `balance` that lists shares, but not one of each of `sample_size` data ranks."""
    shares = shares_of(balance)
    if shares and len(shares) != sample_size:
        raise PlanError(
            f'plan: balance = "{balance}" has {len(shares)} shares, and {sample_size} ranks train on different '
            "samples",
            remedy="give a share for each rank, in the order of ranks",
        )


def is_unequal(balance: str) -> bool:
    """Return whether a plan's `balance` may give ranks unequal shares of a batch."""
    return balance not in ("", EQUAL)


def shares_of(balance: str) -> tuple[float, ...]:
    """Return the shares that a plan's `balance` lists, by data rank; empty: equal ones, or measured ones."""
    if not is_unequal(balance) or balance == SPEED:
        return ()
    try:
        shares = tuple(float(each) for each in balance.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < each < math.inf for each in shares):
        raise PlanError(
            f'plan: balance = "{balance}", expected "none", "speed", or a share above 0 of each data rank, such '
            'as "2,1,1"',
            remedy='leave out a rank that is to train on nothing (start fewer), or use balance = "speed"',
        )
    return shares

"""The ranks that divide experts among them, and what they tell each other: counts first, then rows of tokens.

[Note: four all-to-alls] A layer sends tokens to their experts and the experts' outputs back, and in its backward
pass the gradients of both: 4 all-to-alls a layer and step, each of as many rows as tokens choose experts of other
ranks. Before them one small all-gather tells all ranks the counts of all, so that each knows what it will
receive. It also carries what must be equal on all ranks, so that a difference is an error on all of them.

[Note: gradients of experts] A rank's loss weighs as much as its share of the global batch. For parameters that all
ranks have, the exchange of gradients weighs. An expert's gradient is a sum over tokens of several ranks: their
gradients are weighed where they are sent, and what comes back is weighed back. The sum over the group is divided
by its size, so that it is the mean over the group's ranks; the reducer takes the plain mean over other replicas.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.text import name_ranks
from ..instrument.phase_hooks import inner_exchange

DEGREE = "expert"


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Where this rank is among those that share experts, and among those whose tokens are one global batch."""

    here: World
    group: dist.ProcessGroup | None
    """The ranks that divide the experts; None if each has all of them."""
    batch_group: dist.ProcessGroup
    """The ranks whose batches together are the global batch."""
    members: tuple[int, ...]
    """Places in `batch_group` of the ranks of `group`, in its order; this rank's alone without one."""
    place: int
    """This rank's in `batch_group`."""
    codec: RowCodec
    """How rows travel."""

    @property
    def size(self) -> int:
        """The number of ranks that divide the experts."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.members.index(self.place)

    def batch_ranks(self) -> list[int]:
        """Return the ranks of `batch_group`, as torch's default group numbers them."""
        return list(dist.get_process_group_ranks(self.batch_group))

    def gather_counts(self, layer: str, counts: torch.Tensor, facts: Sequence[tuple[str, int]]) -> torch.Tensor:
        """Return the counts of all ranks, with a dimension of ranks before, by place in `batch_group`.

        Args:
            layer: name of the layer, for errors.
            counts: int64, of one shape on all ranks.
            facts: what must be equal on all ranks, with labels.

        Raises:
            Mismatch: a fact differs; on all ranks.
        """
        equal = torch.tensor([value for _, value in facts], dtype=torch.int64, device=counts.device)
        own = torch.cat([equal, counts.reshape(-1)])
        size = dist.get_world_size(self.batch_group)
        table = torch.empty(size, own.numel(), dtype=torch.int64, device=own.device)
        sent = own.nbytes * (size - 1)
        with translated(self.here, f"counts of tokens of {layer}"), inner_exchange(self.here, DEGREE, sent):
            dist.all_gather(list(table), own, group=self.batch_group)
        self._require_equal(layer, facts, table[:, : len(facts)].tolist())
        return table[:, len(facts) :].reshape(size, *counts.shape)

    def _require_equal(self, layer: str, facts: Sequence[tuple[str, int]], rows: Sequence[Sequence[int]]) -> None:
        for i, (label, _) in enumerate(facts):
            values = [row[i] for row in rows]
            if len(set(values)) > 1:
                names = self.batch_ranks()
                said = [
                    f"{value} on {name_ranks([names[at] for at, each in enumerate(values) if each == value])}"
                    for value in dict.fromkeys(values)
                ]
                raise Mismatch(
                    f"{label} is {', '.join(said)}",
                    rank=self.here.job_rank,
                    operation=f"experts of {layer}",
                    remedy="make all ranks the same",
                )

    def swap(
        self, layer: str, pieces: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Give each rank of `group` its piece, and return those that they have for this one; without gradients.

        What this rank has for itself is returned as it is (rounded as the others' are), and does not travel.

        Args:
            layer: name of the layer, for errors.
            pieces: (rows, width) for each rank.
            rooms: (rows, width) from each rank: memory for what comes, contiguous, where the codec needs no other.
        """
        codec, own = self.codec, self.rank
        packed = [codec.pack(piece) for piece in pieces]
        came = [codec.room(room) for room in rooms]
        mine = packed[own]
        packed[own], came[own] = mine[:0], came[own][:0]
        sent = sum(each.nbytes for each in packed)
        with translated(self.here, f"all-to-all of {layer}"), inner_exchange(self.here, DEGREE, sent):
            dist.all_to_all(came, packed, group=self.group)
        came[own] = mine
        return [codec.unpack(each, pieces[own].dtype) for each in came]


@dataclass
class ExpertSeconds:
    """How long the experts of this rank took in one pass, without the exchange, in seconds."""

    forward: float = 0.0
    backward: float = 0.0
    backward_begin: float = 0.0


@dataclass(frozen=True, eq=False)
class Way:
    """The way of a layer's rows to their experts, and back, in one forward pass and its backward pass."""

    ranks: ExpertRanks
    layer: str
    sent: list[int]
    """Rows for each rank, which follow each other."""
    places: Sequence[torch.Tensor]
    """int64 (rows) for each rank: where its rows are among those of this rank's experts, sorted by expert."""
    seconds: ExpertSeconds = field(default_factory=ExpertSeconds)
    _factor: list[float] = field(default_factory=lambda: [1.0])

    def forth(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows to the experts' ranks; return those that came, sorted by expert."""
        rooms = [rows.new_empty(place.numel(), rows.shape[1]) for place in self.places]
        came = self.ranks.swap(self.layer, rows.contiguous().split(self.sent), rooms)
        out = rows.new_empty(sum(len(place) for place in self.places), rows.shape[1])
        for place, each in zip(self.places, came, strict=True):
            out.index_copy_(0, place, each)
        return out

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows of the experts to the ranks of their tokens; return those that came, by rank."""
        out = rows.new_empty(sum(self.sent), rows.shape[1])
        rooms = out.split(self.sent)
        came = self.ranks.swap(self.layer, [rows[place] for place in self.places], rooms)
        for room, each in zip(rooms, came, strict=True):
            if room.data_ptr() != each.data_ptr():
                room.copy_(each)
        return out

    def weigh(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradients of outputs, weighed by this rank's batch. See [Note: gradients of experts]."""
        self._factor[0] = factor = self.ranks.here.session.batch_weight.factor
        if factor == 1.0:
            return gradients
        return gradients * factor if factor else torch.zeros_like(gradients)

    def weigh_back(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradients of tokens as they are without the weight."""
        factor = self._factor[0]
        if factor == 1.0:
            return gradients
        return gradients / factor if factor else torch.zeros_like(gradients)


class SendRows(torch.autograd.Function):
    """Tokens to their experts; in backward their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, way: Way) -> torch.Tensor:
        """See `torch.autograd.Function`."""
        ctx.way = way
        return way.forth(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """See `torch.autograd.Function`."""
        way: Way = ctx.way
        if way.seconds.backward_begin:
            way.seconds.backward = time.perf_counter() - way.seconds.backward_begin
        return way.weigh_back(way.back(gradients)), None


class ReturnRows(torch.autograd.Function):
    """Outputs of experts to the ranks of their tokens; in backward their gradients go to the experts, weighed."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, way: Way) -> torch.Tensor:
        """See `torch.autograd.Function`."""
        ctx.way = way
        return way.back(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """See `torch.autograd.Function`."""
        way: Way = ctx.way
        came = way.forth(way.weigh(gradients))
        way.seconds.backward_begin = time.perf_counter()
        return came, None


class _DividedGradient(torch.autograd.Function):
    """A parameter of experts, as it is; its gradient is divided."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return gradients[0] / ctx.divisor, None


def with_divided_gradient(parameter: nn.Parameter, divisor: int) -> torch.Tensor:
    """Return `parameter` as a tensor whose gradient reaches it divided. See [Note: gradients of experts]."""
    if divisor == 1:
        return parameter
    divided: torch.Tensor = _DividedGradient.apply(parameter, divisor)
    return divided


# Rows of activations as bytes for the all-to-all: as they are, in bfloat16, or in 8 bits with a scale a row.
#
# A row that is not finite arrives with values that are not finite, whatever the codec.


_SCALE_BYTES = 4


class RowCodec(Protocol):
    """How rows (n, width) of a floating type travel, each by itself."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """Return memory for what `pack` makes of rows as many and as wide as `rows`, of their type."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows` as they travel: (n, anything)."""

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows that `packed` was made of, in `dtype`."""


class ExactRows:
    """As they are."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return rows

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return rows.contiguous()

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `RowCodec`."""
        return packed.to(dtype)


class HalfRows:
    """In bfloat16; rows of 16 bits stay as they are."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return torch.empty_like(rows, dtype=torch.bfloat16 if rows.dtype.itemsize > 2 else rows.dtype)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return (rows.to(torch.bfloat16) if rows.dtype.itemsize > 2 else rows).contiguous()

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `RowCodec`."""
        return packed.to(dtype)


class ByteRows:
    """In 8 bits an element, as multiples of 1/127 of the row's largest absolute value, a float32 at its end."""

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        return torch.empty(rows.shape[0], rows.shape[1] + _SCALE_BYTES, dtype=torch.uint8, device=rows.device)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowCodec`."""
        if not rows.numel():
            return self.room(rows)
        exact = rows.to(torch.float32)
        scales = exact.abs().amax(1, keepdim=True) / 127
        divisors = torch.where(scales > 0, scales, 1.0)
        levels = (exact / divisors).round_().nan_to_num_(0.0).to(torch.int8)
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        return torch.cat([levels.view(torch.uint8), scales.contiguous().view(torch.uint8)], 1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `RowCodec`."""
        if not packed.shape[0]:
            return torch.empty(0, packed.shape[1] - _SCALE_BYTES, dtype=dtype, device=packed.device)
        levels = packed[:, :-_SCALE_BYTES].contiguous().view(torch.int8)
        scales = packed[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        return (levels.to(torch.float32) * scales).to(dtype)


ROW_CODECS: Final[Mapping[str, RowCodec]] = {NONE: ExactRows(), "bf16": HalfRows(), "int8": ByteRows()}
"""By the values of the plan's key `expert_codec`."""

"""Tensors side by side in one flat tensor that is exchanged by a codec: its units, and what is kept for them.

The coded buckets of the reducer and codec sessions are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..codecs.finite import is_finite
from ..codecs.registry import CodecInstance
from ..transport.comm_thread import ITEM_TAGS, SegmentWork
from ..transport.rank_group import RankGroup
from .segments import segment_elements
from .unit_states import UnitStates


class FlatPart(NamedTuple):
    """Where one tensor lies in the flat one. Its elements are contiguous there, in some order of dimensions."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns, the rows running along the slowest dimension."""
        strides = [stride if length > 1 else 0 for stride, length in zip(self.strides, self.shape, strict=True)]
        rows = self.shape[strides.index(max(strides))]
        return rows, self.numel // rows


class CodedFlat:
    """The layout of a flat tensor, and the states of its codec. Holds no memory but the states."""

    def __init__(
        self,
        codec: CodecInstance,
        group: RankGroup,
        like: torch.Tensor,
        parts: Sequence[FlatPart],
        *,
        local_size: int = 1,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """`like`: the flat tensor. `bounds`: the slice of it that this rank exchanges; None: all of it."""
        self.codec, self.group = codec, group
        self.parts = parts
        self.local_size = local_size
        """Ranks of a host that share one part of a group: what the gradient of a codec is the mean of."""
        self.elements, self.device = like.numel(), like.device
        self.bounds = (0, self.elements) if bounds is None else bounds
        begin, end = self.bounds
        if codec.granularity == "matrix":
            self._spans = [(part.offset, part.offset + part.numel) for part in parts]
            self.unit_shapes: list[tuple[int, ...]] = [part.matrix for part in parts]
        else:
            step = segment_elements(end - begin, len(group.ranks), ITEM_TAGS - 1)
            self._spans = [(a, min(a + step, end)) for a in range(begin, end, step)]
            self.unit_shapes = [(b - a,) for a, b in self._spans]
        self.states = UnitStates(codec, group.seat)
        for k, unit in enumerate(self.by_unit(like)):
            self.states.begin(k, unit)

    def like_unit(self, k: int) -> torch.Tensor:
        """Return a tensor of the shape of unit `k`, with unspecified values."""
        return torch.empty(self.unit_shapes[k], dtype=torch.float32, device=self.device)

    def by_part(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of `flat` that belongs to each tensor, in its shape."""
        return [flat.as_strided(*part) for part in self.parts]

    def gaps(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return what lies in `flat` between each tensor and the next."""
        begins = [part.offset for part in self.parts[1:]] + [self.elements]
        return [flat[part.offset + part.numel : begin] for part, begin in zip(self.parts, begins, strict=True)]

    def by_unit(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the units of `flat` that this rank exchanges."""
        return [flat[a:b].view(shape) for (a, b), shape in zip(self._spans, self.unit_shapes, strict=True)]

    def units_of(self, i: int) -> list[int]:
        """Return the units that part `i`, or the gap behind it, has elements in."""
        first = self.parts[i].offset
        end = self.elements if i + 1 == len(self.parts) else self.parts[i + 1].offset
        return [k for k, (a, b) in enumerate(self._spans) if a < end and first < b]

    def residuals_of(self, i: int) -> list[tuple[slice, torch.Tensor]]:
        """Return where part `i` lies in the flat tensor, unit by unit, and its residual there, 1-D views."""
        first, last = self.parts[i].offset, self.parts[i].offset + self.parts[i].numel
        found = []
        for k in self.units_of(i):
            residual, (a, b) = self.states.residual(k), self._spans[k]
            begin, end = max(first, a), min(last, b)
            if residual is not None and begin < end:
                found.append((slice(begin, end), residual.view(-1)[begin - a : end - a]))
        return found

    def unsent(self) -> list[torch.Tensor]:
        """Return the residual of each part, in units of this rank's gradient. Empty without feedback.

        For a shard, the residual is the sum over the ranks of the host.
        """
        if not self.codec.has_feedback:
            return []
        flat = torch.zeros(self.elements, dtype=torch.float32, device=self.device)
        for k, unit in enumerate(self.by_unit(flat)):
            residual = self.states.residual(k)
            if residual is not None:
                torch.mul(residual, self.local_size, out=unit)
        return self.by_part(flat)

    def begin(self, units: Sequence[torch.Tensor]) -> list[int]:
        """Prepare for an exchange of `units`; return the parts whose state overflowed, and begins anew."""
        overflowed: list[int] = []
        if self.codec.leaves_out:
            kept = [self.residuals_of(i) for i in range(len(self.parts))]
            overflowed = [i for i, each in enumerate(kept) if not all(is_finite(left) for _, left in each)]
        is_sound = [self.states.begin(k, unit) for k, unit in enumerate(units)]
        return [] if all(is_sound) else overflowed or list(range(len(self.parts)))

    def work(self, units: Sequence[torch.Tensor], finish: Callable[[bool], None]) -> list[SegmentWork]:
        """Return what exchanges `units` after `begin`, leaving the means there; see `UnitStates.exchange`."""
        if self.codec.granularity == "matrix":
            return [SegmentWork(partial(self.states.exchange_matrices, units), finish, self.group)]
        return [
            SegmentWork(partial(self.states.exchange, k, unit), finish, self.group) for k, unit in enumerate(units)
        ]

"""A bucket whose gradients travel by a codec.

Beside the segments (or matrices) travels one small exact message: the used mask, and whether a
gradient of this rank holds NaN or infinity. Such a bucket contributes zeros, so that nothing poisons the
residuals, and its mean is NaN on every rank: as in a plain loop, where the sum would be. So it is where gradients
that are finite have a mean that is not: see [Note: sums that overflow] in `codecs.finite`. Whoever drops the step
lets the bucket `go_back`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import torch

from ...core.vocabulary.spec import RouteName
from ..autotune.probe_request import ProbeRequest
from ..codecs.batched import fuse
from ..codecs.finite import forget_overflowed, is_finite
from ..codecs.registry import CodecInstance
from ..codecs.rollback import RollbackState
from ..gradients.parameters import Layout
from ..messages.message import Encoding, Message
from ..routes.route import Route
from ..transport.comm_thread import BucketWork, Conversation, SegmentWork
from ..transport.transport import RankGroup
from .bucket import Waitable
from .dense_bucket import DenseBucket

SEGMENT_ELEMENTS = 512 * 1024
"""Elements of a segment that each rank adds up: large enough that calls cost little beside memory (measured)."""
MULTIPLE = 1024
"""Every rank's part of a bucket is whole blocks of all codecs' default sizes."""


@dataclass(eq=False)
class CodedBucket:
    """A dense bucket and its codec's state. A `bucket.Bucket`."""

    members: list[int]
    parameters: Sequence[torch.nn.Parameter]
    layouts: Sequence[Layout]
    made: CodecInstance
    lines: InitVar[Route]
    """To be laid out by, not to be kept: the group must not outlive the world where a model does."""
    probe_request: ProbeRequest
    """The autotuner's question to all ranks, which travels along."""
    pending: int = 0
    had_nonfinite: bool = False
    """Some rank's gradients of the last exchange held NaN or infinity, or their mean does."""
    nonfinite_members: list[int] = field(init=False, default_factory=list)
    """Members whose gradients were not finite on this rank, in the last exchange."""
    overflowed_members: list[int] = field(init=False, default_factory=list)
    """Members whose gradients were finite on all ranks, and their mean is not: the same on all ranks."""
    route: RouteName = field(init=False)
    """By which it was laid out."""
    dense: DenseBucket = field(init=False)
    states: list[RollbackState] = field(init=False)
    """One a segment, or one a matrix."""
    residual: torch.Tensor = field(init=False)
    """What was not sent yet, laid out as the bucket; the states' residuals are views of it."""
    _room: torch.Tensor | None = field(init=False, default=None)
    """For the next residual, and then for the last one. See [Note: two residuals by turns]."""
    _job: BucketWork | None = field(init=False, default=None)
    _units: list[torch.Tensor] = field(init=False)
    _gaps: list[torch.Tensor] = field(init=False)
    _laid_out: torch.Tensor = field(init=False)
    """Whose parts the units and gaps are."""
    _kept_residuals: list[tuple[int, torch.Tensor]] = field(init=False, default_factory=list)
    _has_finite_mean: bool = field(init=False, default=True)
    """Of the units that this rank exchanges."""
    _circle: RankGroup = field(init=False)
    local_size: int = field(init=False)
    """Ranks of a host that share one part of a circle: what the gradient of a codec is the mean of."""
    _segment: int = field(init=False)
    """Elements of a segment."""

    def __post_init__(self, lines: Route) -> None:
        self.route = lines.route
        size = len(lines.everyone.ranks)
        by_slices = lines.route == "hierarchical" and self.made.unit == "segment"
        self._circle = lines.across if by_slices else lines.everyone
        self.local_size = size // len(self._circle.ranks)
        self._segment = SEGMENT_ELEMENTS * len(self._circle.ranks)
        self.dense = DenseBucket(
            self.members,
            list(self.parameters),
            self.layouts,
            size,
            memory=lines.memory if by_slices else None,
            mask_travels_along=False,
            multiple=MULTIPLE * size,
        )
        self.residual = torch.zeros_like(self.flat[:0] if self.made.spec.is_exact else self.flat)
        self._lay_out()
        if self.made.spec.is_exact:
            self.states = [RollbackState() for _ in self._units]
        else:
            self.states = [RollbackState(residual) for residual in self.by_state(self.residual)]
        if self.made.has_feedback:
            self._room = torch.zeros_like(self.flat)  # only this rank's part of it is ever written

    def _lay_out(self) -> None:
        self._units = [_as_real(unit) for unit in self.by_state(self.flat)]
        self._gaps = [gap for gap in self.gaps(self.flat) if gap.numel()]
        self._laid_out = self.flat

    @property
    def flat(self) -> torch.Tensor:
        """The gradients."""
        return self.dense.flat

    @property
    def nbytes(self) -> int:
        """See `Bucket`."""
        return self.dense.nbytes

    @property
    def sent_bytes(self) -> int:
        """Payload bytes this rank sent in the last exchange, counted."""
        if self._job is None:
            return 0
        return self._job.sent_bytes + (0 if self.dense.shared is None else self.dense.shared.sent_bytes)

    @property
    def is_held(self) -> bool:
        """See `Bucket`."""
        return self.dense.is_held

    def note_used(self) -> None:
        """See `Bucket`."""
        self.dense.note_used()

    def holds_used(self, index: int) -> bool:
        """See `Bucket`."""
        return self.dense.holds_used(index)

    @property
    def is_finite(self) -> bool:
        """See `Bucket`."""
        return self.dense.is_finite

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. A codec returns the mean over its circle, so gradients are not divided by its size."""
        self.dense.load(weight * len(self._circle.ranks))
        if self.flat is not self._laid_out:  # it left its memory to those who hold gradients in it
            self._lay_out()
        if self._gaps and not self.made.spec.is_exact:
            torch._foreach_zero_(self._gaps)  # they hold what the codec made of them in the last exchange
        self.nonfinite_members = self._forget_overflowed() if self.made.leaves_out else []
        self._keep_absent()
        if not self.made.spec.is_exact and not is_finite(self.flat):
            self.nonfinite_members = sorted({*self.nonfinite_members, *self._not_finite(self.flat)})
        if self.nonfinite_members:
            self.flat.zero_()

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        self.dense.add(position, tensor, factor * len(self._circle.ranks))

    def launch(self, lines: Route) -> Waitable:
        """See `Bucket`."""
        assert lines.conductor is not None, "a codec needs its conductor"
        self._has_finite_mean = True
        rooms: Sequence[torch.Tensor | None] = [None] * len(self.states)
        if self._room is not None:
            rooms = self.by_state(self._room)
        for state, room in zip(self.states, rooms, strict=True):
            state.begin(room, copies=self.made.spec.is_own)
        self.dense.gradients.note_uses()
        items = [SegmentWork(self._announce, self._take_announcements, lines.everyone)]
        if self.made.unit == "matrix":
            items.append(SegmentWork(self._begin_matrices, self._land_matrices, self._circle))
        else:
            seat = self._circle.seat
            items += [
                SegmentWork(partial(self.made.exchange, unit, state, seat), self._land_unit, self._circle)
                for unit, state in zip(self._units, self.states, strict=True)
            ]
        shared = self.dense.shared
        if shared is None:
            self._job = lines.conductor.submit(items)
        else:
            add_up = partial(shared.reduce_scatter, self.dense.divisor)
            self._job = lines.conductor.submit(items, prepare=add_up, complete=shared.all_gather)
        return self._job

    def finalize(self) -> None:
        """See `Bucket`."""
        self.overflowed_members = []
        if not self.had_nonfinite and not self._mean_is_finite():
            self.overflowed_members = self._not_finite(self.flat)
            self.had_nonfinite = True
        self._take_turns()
        self._return_kept()
        if self.had_nonfinite:
            self.flat.fill_(torch.nan)
        self.dense.finalize()

    def go_back(self) -> None:
        """Keep what was kept before the last exchange, as if it had not been: its mean is used by nobody."""
        self._take_turns()
        for state in self.states:
            state.go_back()

    @torch.no_grad()
    def rescale_kept(self, change: float) -> None:
        """Multiply residuals and velocities, which are linear in the gradients, by `change`."""
        if self.made.spec.is_exact:
            return  # nothing is kept, and no residual to lay it out by
        for state, unit in zip(self.states, self.by_state(self.residual), strict=True):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.shape == unit.shape and value.is_floating_point():
                    value.mul_(change)

    def _mean_is_finite(self) -> bool:
        """Return whether the whole mean is, which is so on all ranks or on none."""
        if self.made.spec.is_exact:
            return True
        # Of other slices of the host this rank has seen no more than what lies here now.
        return self._has_finite_mean if self.dense.shared is None else is_finite(self.flat)

    def _not_finite(self, flat: torch.Tensor) -> list[int]:
        """Return the members whose part of `flat`, laid out as the bucket, holds NaN or infinity."""
        parts = zip(self.members, self.by_parameter(flat), strict=True)
        return [index for index, part in parts if not bool(torch.isfinite(part).all())]

    def _forget_overflowed(self) -> list[int]:
        """Begin anew where what is kept overflowed in the last exchange; return the members that this concerns."""
        overflowed = [] if is_finite(self.residual) else self._not_finite(self.residual)
        forgotten = [forget_overflowed(state) for state in self.states]
        return (overflowed or list(self.members)) if any(forgotten) else []

    def _take_turns(self) -> None:
        if self._room is not None:
            self.residual, self._room = self._room, self.residual

    def zero_missing_grads(self) -> None:
        """See `Bucket`."""
        self.dense.zero_missing_grads()

    def mark_steps(self, steps: int | None) -> None:
        """See `Bucket`."""
        self.dense.mark_steps(steps)

    @property
    def steps_differ(self) -> bool:
        """See `Bucket`."""
        return self.dense.steps_differ

    def by_parameter(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of `flat`, laid out as the bucket, that belongs to each member."""
        views = self.dense.gradients.mended()
        return [flat.as_strided(view.size(), view.stride(), view.storage_offset()) for view in views]

    def gaps(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of `flat`, laid out as the bucket, between each member and the next."""
        views = self.dense.gradients.mended()
        begins = [int(view.storage_offset()) for view in views]
        ends = [begin + view.numel() for begin, view in zip(begins, views, strict=True)]
        return [flat[end:begin] for end, begin in zip(ends, [*begins[1:], flat.numel()], strict=True)]

    def by_state(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of `flat`, laid out as the bucket, that belongs to each state."""
        if self.made.unit == "matrix":
            return [self._matrix(flat, view) for view in self.dense.gradients.mended()]
        begin, end = self.my_slice()
        return [unit for unit in flat[begin:end].split(self._segment) if unit.numel()]

    def my_slice(self) -> tuple[int, int]:
        """Return where in `flat` the part lies that this rank carries, in elements."""
        shared = self.dense.shared
        if shared is None:
            return 0, self.flat.numel()
        return shared.slice_bounds(shared.local_rank)

    def unsent(self) -> list[torch.Tensor]:
        """Return what is left of each member, in units of this rank's gradient: the bucket's end.

        Of a slice the rank carries what is left of all ranks of its host.
        """
        if self.made.spec.is_exact:
            return []
        return self.by_parameter(self.residual * self.local_size)

    def _keep_absent(self) -> None:
        """Ask for nothing for members without a gradient: what is left of them waits until they have one."""
        self._kept_residuals = []
        absent = self.dense.mask.unused
        if not absent or self.made.spec.is_exact:
            return
        residuals = self.by_parameter(self.residual)
        for i in absent:
            self._kept_residuals.append((i, residuals[i].clone()))
            self.dense.bucket_views[i].copy_(residuals[i]).neg_()

    def _return_kept(self) -> None:
        if not self._kept_residuals:
            return
        residuals, present = self.by_parameter(self.residual), self.dense.mask.counts.tolist()
        for i, kept in self._kept_residuals:
            if present[i]:
                residuals[i].add_(kept)
            else:
                residuals[i].copy_(kept)  # what was sent is used by nobody
        self._kept_residuals = []

    # -- what travels --------------------------------------------------------------------------

    def _announce(self) -> Encoding:
        answers = [float(bool(self.nonfinite_members)), float(self.probe_request.by_this_rank)]
        counts = self.dense.mask.counts
        mine = torch.cat([counts, counts.new_tensor(answers)])
        total = yield Message(mine, "sum")
        return total, mine

    def _take_announcements(self, result: tuple[torch.Tensor, torch.Tensor]) -> None:
        total, _ = result
        self.dense.mask.counts.copy_(total[:-2])
        self.had_nonfinite = bool(total[-2] > 0)
        self.probe_request.by_any_rank |= bool(total[-1] > 0)

    def _begin_matrices(self) -> Conversation:
        seat = self._circle.seat
        return fuse(
            [self.made.codec(unit, state, seat) for unit, state in zip(self._units, self.states, strict=True)]
        )

    def _land_unit(self, has_finite_mean: bool) -> None:
        self._has_finite_mean &= has_finite_mean

    def _land_matrices(self, results: Any) -> None:
        for unit, (mean, _) in zip(self._units, results, strict=True):
            unit.copy_(mean)
            self._has_finite_mean &= is_finite(mean)

    @staticmethod
    def _matrix(flat: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Return the elements of `view` in `flat` as a matrix whose rows run along the slowest dimension."""
        strides = [stride if length > 1 else 0 for stride, length in zip(view.stride(), view.shape, strict=True)]
        rows = view.shape[strides.index(max(strides))]
        start = view.storage_offset()
        return flat[start : start + view.numel()].view(rows, -1)


def _as_real(unit: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers: sums and means of complex ones are those of their parts."""
    return torch.view_as_real(unit).view(-1) if unit.is_complex() else unit

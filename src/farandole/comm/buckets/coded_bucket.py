"""A bucket whose gradients travel by a codec.

Beside the segments (or matrices) travels one small exact message: the used mask, and whether a
gradient of this rank holds NaN or infinity. Such a bucket contributes zeros, so that nothing poisons the
residuals, and its mean is NaN on every rank: as in a plain loop, where the sum would be. So it is where gradients
that are finite have a mean that is not: see [Note: sums that overflow] in `codecs.finite`. A step that is dropped
is followed by `restore_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial

import torch

from ...core.vocabulary.spec import RouteName
from ..autotune.probe_request import ProbeRequest
from ..codecs.finite import is_finite
from ..codecs.registry import CodecInstance
from ..gradients.parameters import Layout
from ..messages.message import Message, Reduction
from ..routes.route import Route
from ..sessions.coded_flat import CodedFlat, FlatPart
from ..sessions.segments import MULTIPLE
from ..transport.comm_thread import BucketWork, SegmentWork
from .bucket import Waitable
from .dense_bucket import DenseBucket


@dataclass(eq=False)
class CodedBucket:
    """A dense bucket and its codec's state. A `bucket.Bucket`."""

    members: list[int]
    parameters: Sequence[torch.nn.Parameter]
    layouts: Sequence[Layout]
    made: CodecInstance
    lines: InitVar[Route]
    """Used for the layout only; holding it would keep the process group alive as long as the model."""
    probe_request: ProbeRequest
    """The autotuner's request for a probe, which is sent along."""
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
    coded: CodedFlat = field(init=False)
    """Its layout, and what the codec keeps."""
    _job: BucketWork | None = field(init=False, default=None)
    _units: list[torch.Tensor] = field(init=False)
    _gaps: list[torch.Tensor] = field(init=False)
    _laid_out: torch.Tensor = field(init=False)
    """Whose parts the units and gaps are."""
    _kept_residuals: list[tuple[int, list[torch.Tensor]]] = field(init=False, default_factory=list)
    _has_finite_mean: bool = field(init=False, default=True)
    """Whether the means of the units that this rank exchanges are finite."""

    def __post_init__(self, lines: Route) -> None:
        self.route = lines.route
        size = len(lines.everyone.ranks)
        by_slices = lines.route == "hierarchical" and self.made.granularity == "segment"
        group = lines.across if by_slices else lines.everyone
        self.dense = DenseBucket(
            self.members,
            list(self.parameters),
            self.layouts,
            size,
            memory=lines.memory if by_slices else None,
            mask_travels_along=False,
            multiple=MULTIPLE * size,
        )
        shared = self.dense.shared
        self.coded = CodedFlat(
            self.made,
            group,
            self.flat,
            [FlatPart(tuple(v.shape), v.stride(), int(v.storage_offset())) for v in self.dense.bucket_views],
            local_size=size // len(group.ranks),
            bounds=None if shared is None else shared.slice_bounds(shared.local_rank),
        )
        self._lay_out()

    def _lay_out(self) -> None:
        self._units = [_as_real(unit) for unit in self.coded.by_unit(self.flat)]
        self._gaps = [gap for gap in self.coded.gaps(self.flat) if gap.numel()]
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
        """See `Bucket`. A codec returns the mean over its group, so gradients are not divided by its size."""
        self.dense.load(weight * self.coded.states.group.size)
        if self.flat is not self._laid_out:  # it left its memory to those who hold gradients in it
            self._lay_out()
        if self._gaps and not self.made.spec.is_exact:
            torch._foreach_zero_(self._gaps)  # they hold what the codec made of them in the last exchange
        overflowed = [] if self.made.spec.is_exact else self.coded.begin(self._units)
        self.nonfinite_members = [self.members[i] for i in overflowed]
        self._keep_absent()
        # Finite numbers may have an infinite sum; members are named only for what they hold themselves.
        if not self.made.spec.is_exact and not bool(torch.isfinite(self.flat.sum())):
            self.nonfinite_members = sorted({*self.nonfinite_members, *self._not_finite(self.flat)})
        if self.nonfinite_members:
            self.flat.zero_()

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        self.dense.add(position, tensor, factor * self.coded.states.group.size)

    def launch(self, lines: Route) -> Waitable:
        """See `Bucket`."""
        assert lines.conductor is not None, "a codec needs its conductor"
        self._has_finite_mean = True
        self.dense.gradients.note_uses()
        items = [SegmentWork(self._announce, self._take_announcements, lines.everyone)]
        items += self.coded.work(self._units, self._note_finite)
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
        self._return_kept()
        if self.had_nonfinite:
            self.flat.fill_(torch.nan)
        self.dense.finalize()

    def restore_state(self) -> None:
        """Keep what was kept before the last exchange, as if it had not been: its mean is not used."""
        self.coded.states.restore()

    @torch.no_grad()
    def rescale_kept(self, change: float) -> None:
        """Multiply residuals and velocities, which are linear in the gradients, by `change`."""
        self.coded.states.rescale(change)

    def _mean_is_finite(self) -> bool:
        """Return whether the whole mean is, which is so on all ranks or on none."""
        if self.made.spec.is_exact:
            return True
        # This rank has seen other slices of the host only as they lie here now.
        return self._has_finite_mean if self.dense.shared is None else is_finite(self.flat)

    def _not_finite(self, flat: torch.Tensor) -> list[int]:
        """Return the members whose part of `flat`, laid out as the bucket, holds NaN or infinity."""
        parts = zip(self.members, self.coded.by_part(flat), strict=True)
        return [index for index, part in parts if not bool(torch.isfinite(part).all())]

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

    def _keep_absent(self) -> None:
        """Ask for nothing for members without a gradient: their residuals wait until they have one."""
        self._kept_residuals = []
        for i in self.dense.mask.unused if self.made.has_feedback else []:
            kept = []
            for where, residual in self.coded.residuals_of(i):
                kept.append(residual.clone())
                self.flat[where].copy_(residual).neg_()
            self._kept_residuals.append((i, kept))

    def _return_kept(self) -> None:
        present = self.dense.mask.counts.tolist() if self._kept_residuals else []
        for i, kept in self._kept_residuals:
            for (_, residual), before in zip(self.coded.residuals_of(i), kept, strict=True):
                if present[i]:
                    residual.add_(before)
                else:
                    residual.copy_(before)  # what was sent is not used
        self._kept_residuals = []

    # -- what travels --------------------------------------------------------------------------

    def _announce(self) -> Reduction:
        answers = [float(bool(self.nonfinite_members)), float(self.probe_request.by_this_rank)]
        counts = self.dense.mask.counts
        mine = torch.cat([counts, counts.new_tensor(answers)])
        return (yield Message(mine, "all_reduce"))

    def _take_announcements(self, total: torch.Tensor) -> None:
        self.dense.mask.counts.copy_(total[:-2])
        self.had_nonfinite = bool(total[-2] > 0)
        self.probe_request.by_any_rank |= bool(total[-1] > 0)

    def _note_finite(self, has_finite_mean: bool) -> None:
        self._has_finite_mean &= has_finite_mean


def _as_real(unit: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers: sums and means of complex ones are those of their parts."""
    return torch.view_as_real(unit).view(-1) if unit.is_complex() else unit

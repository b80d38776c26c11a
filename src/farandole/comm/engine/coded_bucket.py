"""A bucket whose gradients travel by a codec.

Beside the segments (or matrices) travels one small exact message, the announcement: a byte for each member that
says whether this rank has a gradient for it, and others for how many steps it has made and whether a gradient of
this rank holds NaN or infinity. Such a bucket contributes zeros, so that nothing poisons the residuals, and its
mean is NaN on every rank: as in a plain loop, where the sum would be. So it is where gradients that are finite
have a mean that is not: see [Note: sums that overflow] in `codecs.codec`. A step that is dropped is followed by
`UnitStates.restore`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from ..autotune.probe import ProbeRequest
from ..codecs.codec import is_finite
from ..codecs.registry import CodecInstance
from ..codecs.units import MULTIPLE, CodedFlat, FlatPart
from ..device.streams import HostCopy, Streams
from ..messages import Message, Reduction
from ..routes import Route
from ..transport.comm_thread import BucketWork, SegmentWork
from ..transport.staged_conductor import StreamWork
from .bucket import Bucket, Waitable
from .grad_ownership import FlatGradients
from .parameters import Layout, square_sum

# Tensors to be added to a gradient at its next exchange, by parameter.
#
# Two kinds: what an old codec left unsent when another took its place, and what an optimizer adds to the
# gradient (`GradientReducer.add_extra_gradient`). Both wait while no rank has a gradient for the parameter, and
# are pending again when the step that they were sent in is dropped; both are this rank's own, in units of its
# gradient.

Extra = tuple[torch.Tensor, float]
"""A tensor that belongs to the caller, and what it is to be multiplied by."""


@dataclass
class CarryOver:
    """What is pending for each parameter, by its index. See the module."""

    unsent: dict[int, torch.Tensor] = field(default_factory=dict)
    extra: dict[int, Extra] = field(default_factory=dict)
    is_active: bool = False
    """Whether anything is pending, or was sent in the last exchange."""
    _sent_unsent: dict[int, torch.Tensor] = field(default_factory=dict)
    _sent_extra: dict[int, Extra] = field(default_factory=dict)
    """What the last exchange took along."""

    def keep(self, index: int, unsent: torch.Tensor) -> None:
        """Remember what was not sent, beside what is remembered already."""
        before = self.unsent.get(index)
        self.unsent[index] = unsent if before is None else before + unsent
        self.is_active = True

    def add_extra_gradient(self, index: int, extra: Extra | None) -> None:
        """Add `extra` to the next gradient of the parameter, instead of an earlier one; None: nothing."""
        if extra is None:
            self.extra.pop(index, None)
        else:
            self.extra[index] = extra
            self.is_active = True

    def has_pending(self, index: int) -> bool:
        """Return whether an extra gradient has not been sent yet."""
        return index in self.extra

    def rescale(self, change: float) -> None:
        """Multiply what was not sent, for gradients are in other units now."""
        self.unsent = {index: unsent * change for index, unsent in self.unsent.items()}

    def add_to(self, bucket: Bucket) -> None:
        """Add to a bucket that is loaded what is pending for its members."""
        for position, index in enumerate(bucket.members):
            if index in self.unsent:
                bucket.add(position, self.unsent[index], 1.0)
            if index in self.extra:
                bucket.add(position, *self.extra[index])

    def settle(self, exchanged: list[int]) -> None:
        """Note what an exchange has taken along, given the parameters that have their mean now."""
        self._sent_unsent = {index: self.unsent.pop(index) for index in exchanged if index in self.unsent}
        self._sent_extra = {index: self.extra.pop(index) for index in exchanged if index in self.extra}
        self.is_active = bool(self.unsent or self.extra or self._sent_unsent or self._sent_extra)

    def roll_back(self, index: int) -> None:
        """Have pending again what the last exchange took along: its step was dropped."""
        if index in self._sent_unsent:
            self.keep(index, self._sent_unsent.pop(index))
        if index in self._sent_extra:
            self.extra.setdefault(index, self._sent_extra.pop(index))


NO_STEPS = 255
"""Announced by a rank that makes no step, and agrees with all."""


def steps_byte(steps: int | None) -> int:
    """Return the steps of a rank as they are announced; None: it makes none."""
    return NO_STEPS if steps is None else steps % NO_STEPS


class BucketFlags(NamedTuple):
    """Those of one rank before they travel: (...); of all ranks after it: (ranks, ...). All uint8."""

    flags: torch.Tensor
    """(..., k): whether it has NaN or infinity; for some buckets, whether it asks for a probe."""
    steps: torch.Tensor
    """(..., 1): see `steps_byte`."""
    used: torch.Tensor
    """(..., members): 0 for a member without a gradient."""

    @classmethod
    def of_rank(cls, flags: Collection[bool], steps: int, members: int, unused: Collection[int]) -> BucketFlags:
        """Return this rank's. `unused`: places of the members without a gradient."""
        used = torch.ones(members, dtype=torch.uint8)
        used[list(unused)] = 0
        return cls(torch.tensor(list(flags), dtype=torch.uint8), torch.tensor([steps], dtype=torch.uint8), used)

    @classmethod
    def unpack(cls, rows: torch.Tensor, flags: int) -> BucketFlags:
        """Return those of all ranks, with so many flags, from the bytes of `pack`: (ranks, bytes)."""
        return cls(rows[:, :flags], rows[:, flags : flags + 1], rows[:, flags + 1 :])

    def pack(self) -> torch.Tensor:
        """Return the bytes that travel."""
        return torch.cat(self)

    @property
    def steps_differ(self) -> bool:
        """Whether ranks are in different steps."""
        return len({*self.steps.flatten().tolist()} - {NO_STEPS}) > 1

    def users(self) -> list[int]:
        """Return how many ranks have a gradient for each member."""
        counts: list[int] = self.used.sum(0).tolist()
        return counts


NOTHING = BucketFlags(*(torch.empty(0, 0, dtype=torch.uint8) for _ in range(3)))
"""Before the first exchange."""


class _Cut(NamedTuple):
    """A flat tensor cut into what the codec is given, and what lies between its members."""

    flat: torch.Tensor
    units: list[torch.Tensor]
    gaps: list[torch.Tensor]


class CodedBucket(Bucket):
    """Gradients of one dtype in one flat tensor, and a codec with its state."""

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        codec: CodecInstance,
        *,
        lines: Route,
        probe_request: ProbeRequest,
    ) -> None:
        """`lines`: used for the layout only; holding it would keep the process group alive as long as the model.

        `probe_request`: the autotuner's request for a probe, which is sent along.
        """
        self.members, self.pending = members, 0
        # - Memory and codec
        self._route, size = lines.route, len(lines.everyone.ranks)
        group, memory = lines.slices if codec.granularity == "segment" else (lines.everyone, None)
        self.gradients: FlatGradients = FlatGradients(parameters, layouts, memory=memory, multiple=MULTIPLE * size)
        shared, flat = self.gradients.shared, self.gradients.flat
        self.coded: CodedFlat = CodedFlat(
            codec,
            group,
            flat,
            [FlatPart(tuple(v.shape), v.stride(), int(v.storage_offset())) for v in self.gradients.views],
            local_size=size // len(group.ranks),
            bounds=None if shared is None else shared.slice_bounds(shared.local_rank),
        )
        self._cut = self._cut_flat()
        # - Of the last exchange
        self.had_nonfinite, self.nonfinite_members, self.overflowed_members = False, [], []
        self._work: BucketWork | StreamWork | None = None
        self._steps = NO_STEPS
        self._announced = NOTHING
        """By all ranks."""
        self._kept_residuals: list[tuple[int, list[torch.Tensor]]] = []
        self._has_finite_mean: bool | torch.Tensor = True
        """Whether the means of the units that this rank exchanges are finite: `finite_flag`."""
        self._probe_request = probe_request

    def _cut_flat(self) -> _Cut:
        flat = self.gradients.flat
        units = [_as_real(unit) for unit in self.coded.by_unit(flat)]
        return _Cut(flat, units, [gap for gap in self.coded.gaps(flat) if gap.numel()])

    @property
    def sent_bytes(self) -> int:
        """See `Bucket`. Counted."""
        if self._work is None:
            return 0
        shared = self.gradients.shared
        return self._work.sent_bytes + (0 if shared is None else shared.sent_bytes)

    def fits(self, route: Route) -> bool:
        """See `Bucket`."""
        return self._route == route.route

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. A codec returns the mean over its group, so gradients are not divided by its size."""
        codec, flat = self.coded.codec, self.gradients.flat
        self.gradients.load(weight * self.coded.states.group.size)
        self._steps, self.nonfinite_members, self._kept_residuals = NO_STEPS, [], []
        if self.gradients.flat is not self._cut.flat:  # it left its memory to those who hold gradients in it
            self._cut = self._cut_flat()
            flat = self.gradients.flat
        if codec.spec.is_exact:
            return
        if self._cut.gaps:
            torch._foreach_zero_(self._cut.gaps)  # they hold what the codec made of them in the last exchange
        self._prepare(flat)

    def _prepare(self, flat: torch.Tensor) -> None:
        """Begin with the units of `flat`; a rank whose gradients are not finite contributes zeros."""
        not_finite = {self.members[i] for i in self.coded.begin(self._cut.units)}
        self._keep_absent()
        # Finite numbers may have an infinite sum; members are named only for what they hold themselves.
        if not bool(torch.isfinite(flat.sum())):
            not_finite.update(self._not_finite(flat))
        if not_finite:
            self.nonfinite_members = sorted(not_finite)
            flat.zero_()

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        self.gradients.add(position, tensor, factor / self.coded.local_size)

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        assert route.conductor is not None, "a codec needs its conductor"
        self.gradients.note_uses()
        items = self._items(route)
        shared = self.gradients.shared
        if shared is None:
            work = route.conductor.submit(items)
        else:
            add_up = partial(shared.reduce_scatter, self.gradients.divisor)
            work = route.conductor.submit(items, prepare=add_up, complete=shared.all_gather)
        self._work = work
        return work

    def _items(self, route: Route) -> list[SegmentWork]:
        self._has_finite_mean = True
        announcements = SegmentWork(self._announce, self._take_announcements, route.everyone)
        return [announcements, *self.coded.work(self._cut.units, self._note_finite)]

    def finalize(self) -> None:
        """See `Bucket`."""
        flat = self.gradients.flat
        self.overflowed_members = []
        if not self.had_nonfinite and not self._mean_is_finite():
            self.overflowed_members = self._not_finite(flat)
            self.had_nonfinite = True
        used = self._announced.users() if self.gradients.unused else []
        self._return_kept(used)
        if self.had_nonfinite:
            flat.fill_(torch.nan)
        self.gradients.finalize(used)

    def own_square(self) -> torch.Tensor:
        """See `Bucket`. What `load` took for the codec's group is times the group's size."""
        factor = self.coded.states.group.size * self.gradients.divisor
        return square_sum(self.gradients.views) / factor**2

    def mean_square(self, rank: int, size: int) -> torch.Tensor:
        """See `Bucket`."""
        return square_sum(self.gradients.views[rank::size])

    def mark_steps(self, steps: int | None) -> bool:
        """See `Bucket`."""
        self._steps = steps_byte(steps)
        return True

    @property
    def steps_differ(self) -> bool:
        """See `Bucket`."""
        return self._announced.steps_differ

    def _mean_is_finite(self) -> bool:
        """Return whether the whole mean is, which is so on all ranks or on none."""
        if self.coded.codec.spec.is_exact:
            return True
        # This rank has seen other slices of the host only as they lie here now.
        return bool(self._has_finite_mean) if self.gradients.shared is None else is_finite(self.gradients.flat)

    def _not_finite(self, flat: torch.Tensor) -> list[int]:
        """Return the members whose part of `flat`, laid out as the bucket, holds NaN or infinity."""
        parts = zip(self.members, self.coded.by_part(flat), strict=True)
        return [index for index, part in parts if not bool(torch.isfinite(part).all())]

    def _keep_absent(self) -> None:
        """Ask for nothing for members without a gradient: their residuals wait until they have one."""
        for i in self.gradients.unused if self.coded.codec.has_feedback else []:
            kept = []
            for where, residual in self.coded.residuals_of(i):
                kept.append(residual.clone())
                self.gradients.flat[where].copy_(residual).neg_()
            self._kept_residuals.append((i, kept))

    def _return_kept(self, used: Sequence[int]) -> None:
        for i, kept in self._kept_residuals:
            for (_, residual), before in zip(self.coded.residuals_of(i), kept, strict=True):
                if used[i]:
                    residual.add_(before)
                else:
                    residual.copy_(before)  # what was sent is not used

    # -- what travels --------------------------------------------------------------------------

    def _announce(self) -> Reduction:
        flags = bool(self.nonfinite_members), self._probe_request.by_this_rank
        mine = BucketFlags.of_rank(flags, self._steps, len(self.members), self.gradients.unused)
        return (yield Message(mine.pack(), "all_gather"))

    def _take_announcements(self, rows: torch.Tensor) -> None:
        self._take_announced(rows)

    def _take_announced(self, rows: torch.Tensor) -> None:
        self._announced = BucketFlags.unpack(rows, flags=2)
        self.had_nonfinite, is_probe_wanted = self._announced.flags.bool().any(0).tolist()
        self._probe_request.by_any_rank |= is_probe_wanted

    def _note_finite(self, has_finite_mean: bool | torch.Tensor) -> None:
        self._has_finite_mean = has_finite_mean & self._has_finite_mean


def _as_real(unit: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers: sums and means of complex ones are those of their parts."""
    return torch.view_as_real(unit).view(-1) if unit.is_complex() else unit


# A bucket whose gradients travel by a codec, on a device: the host waits for no number of it.
#
# What a `CodedBucket` decides by numbers is decided where they are: a rank whose gradients are not finite
# contributes zeros by a mask, its flag travels in the announcement, and what codecs keep goes back by
# `torch.where`, at once and on all ranks alike. The host reads the announcements an exchange later, or when it
# is asked (`settle`); at once only on a rank that has members without a gradient, whose fate is the optimizer's
# business. See [Note: no wait for a device] in `device.streams`.

_FLAGS = 2
"""In an announcement: whether gradients hold NaN or infinity, and whether a probe is asked for."""


class _Report(NamedTuple):
    """What an exchange brought, for the host: bytes, in the order in which they are copied."""

    announced: torch.Tensor
    """(ranks, bytes): see `BucketFlags.pack`."""
    own_bad: torch.Tensor
    """(members,): whether this rank's gradient was not finite."""
    mean_bad: torch.Tensor
    """(members,): whether the mean was not, though all ranks' gradients were."""

    def pack(self) -> torch.Tensor:
        return torch.cat(
            [self.announced.flatten(), self.own_bad.view(torch.uint8), self.mean_bad.view(torch.uint8)]
        )

    @classmethod
    def unpack(cls, copy: torch.Tensor, ranks: int, members: int) -> _Report:
        announced = copy[: ranks * (_FLAGS + 1 + members)].view(ranks, -1)
        return cls(announced, copy[-2 * members : -members], copy[-members:])


class LateAnnouncements:
    """What ranks said of their steps, on its way to the host: see `LateSteps`."""

    def __init__(self, copy: HostCopy, ranks: int, members: int) -> None:
        self._copy, self._ranks, self._members = copy, ranks, members

    def read(self) -> _Report:
        """Return all that was said, when it has arrived."""
        return _Report.unpack(self._copy.read(), self._ranks, self._members)

    @property
    def has_arrived(self) -> bool:
        """See `LateSteps`."""
        return self._copy.has_arrived

    @property
    def differ(self) -> bool:
        """Whether the ranks have made different numbers of steps."""
        return BucketFlags.unpack(self.read().announced, _FLAGS).steps_differ


class DeviceCodedBucket(CodedBucket):
    """Gradients of one dtype in one flat tensor on a device, and a codec with its state there."""

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        codec: CodecInstance,
        *,
        lines: Route,
        probe_request: ProbeRequest,
        streams: Streams,
    ) -> None:
        """`streams`: of the device that the parameters are on."""
        super().__init__(members, parameters, layouts, codec, lines=lines, probe_request=probe_request)
        self._streams = streams
        flat = self.gradients.flat
        self._own_bad = torch.zeros(len(members), dtype=torch.bool, device=flat.device)
        self._rows: torch.Tensor | None = None
        """Announcements of all ranks, on the device."""
        self._sent: torch.Tensor | None = None
        """The announcement of a step with all gradients, without its flag and its number, on the device."""
        self._parts_of: tuple[torch.Tensor, list[torch.Tensor]] = flat, []
        """The flat tensor and its parts, by member: views take the host as long as launches."""
        self._late: LateAnnouncements | None = None

    # -- what the host learns ------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """See `Bucket`."""
        return self._late is None

    def settle(self) -> None:
        """See `Bucket`."""
        late, self._late = self._late, None
        if late is None:
            return
        report = late.read()
        self._take_announced(report.announced)
        self.nonfinite_members = self._named(report.own_bad)
        self.overflowed_members = [] if self.had_nonfinite else self._named(report.mean_bad)
        self.had_nonfinite = self.had_nonfinite or bool(self.overflowed_members)

    @property
    def late_steps(self) -> LateAnnouncements | None:  # type: ignore[override]  # None elsewhere
        """See `Bucket`."""
        return self._late

    def _named(self, bad: torch.Tensor) -> list[int]:
        return [index for index, is_bad in zip(self.members, bad.tolist(), strict=True) if is_bad]

    # -- one exchange --------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`."""
        self.settle()  # an exchange old
        super().load(weight)

    def _prepare(self, flat: torch.Tensor) -> None:
        begun = [self.coded.states.begin_on_device(k, unit) for k, unit in enumerate(self._cut.units)]
        self._keep_absent()
        self._own_bad = self._bad_members(flat)
        for overflowed in begun:
            if overflowed is not None:
                self._own_bad |= overflowed
        flat.masked_fill_(self._own_bad.any(), 0.0)

    def launch(self, route: Route) -> StreamWork:
        """See `Bucket`."""
        assert route.on_device is not None, "a codec needs its conductor"
        self.gradients.note_uses()
        shared = self.gradients.shared
        add_up = None if shared is None else partial(shared.reduce_scatter, self.gradients.divisor)
        work = route.on_device.submit(self._items(route), self._land, add_up)
        self._work = work
        return work

    def finalize(self) -> None:
        """See `Bucket`."""
        if self.gradients.unused:
            self.settle()
        self.gradients.finalize(self._announced.users() if self.gradients.unused else ())

    def _bad_members(self, flat: torch.Tensor) -> torch.Tensor:
        """Return which members' parts of `flat` hold NaN or infinity: (members,) of bool, on the device."""
        if self._parts_of[0] is not flat or not self._parts_of[1]:
            self._parts_of = flat, self.coded.by_part(flat)
        parts = self._parts_of[1]
        norms = torch._foreach_norm([part for part in parts if part.numel()], torch.inf)
        if len(norms) < len(parts):
            found, nothing = iter(norms), torch.zeros((), dtype=torch.float32, device=flat.device)
            norms = tuple(next(found) if part.numel() else nothing for part in parts)
        return torch.stack(norms).mul_(0.0).ne(0.0)  # of NaN and infinity it is NaN

    # -- on the side stream --------------------------------------------------------------------

    def _announce(self) -> Reduction:
        """Say what `CodedBucket` does."""
        is_usual = not (self._probe_request.by_this_rank or self.gradients.unused)
        sent = self._sent if is_usual else None
        if sent is None:
            flags = False, self._probe_request.by_this_rank
            mine = BucketFlags.of_rank(flags, self._steps, len(self.members), self.gradients.unused).pack()
            sent = self._streams.to_device(mine)
            self._sent = sent if is_usual else self._sent
        else:
            sent[_FLAGS : _FLAGS + 1].fill_(self._steps)
        torch.any(self._own_bad, 0, keepdim=True, out=sent[:1].view(torch.bool))
        return (yield Message(sent, "all_gather"))

    def _take_announcements(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def _land(self) -> None:
        """Let the mean be NaN, and what is kept be that of before, if some rank had NaN or infinity."""
        flat, rows, shared = self.gradients.flat, self._rows, self.gradients.shared
        assert rows is not None, "announcements travel first"
        if shared is not None:
            shared.all_gather()
        mean_bad = self._bad_members(flat)
        said = rows.ne(0).any(0)
        bad = said[0] | mean_bad.any()
        if shared is None:  # else it is of this rank's slice alone, and all ranks see all of them
            bad = bad | (self._has_finite_mean ^ True)
        self._return_kept_where(said[_FLAGS + 1 :])
        self.coded.states.restore_where(bad)
        flat.masked_fill_(bad, torch.nan)
        copy = self._streams.to_host(_Report(rows, self._own_bad, mean_bad).pack())
        self._late, self._rows = LateAnnouncements(copy, len(rows), len(self.members)), None

    def _return_kept_where(self, used: torch.Tensor) -> None:
        """Do what `_return_kept` does. `used`: whether some rank has a gradient, by member, on the device."""
        for i, kept in self._kept_residuals:
            for (_, residual), before in zip(self.coded.residuals_of(i), kept, strict=True):
                torch.where(used[i], residual + before, before, out=residual)

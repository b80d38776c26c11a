"""A bucket whose gradients travel by a codec, on a device: the host waits for no number of it.

What a `CodedBucket` decides by numbers is decided where they are: a rank whose gradients are not finite
contributes zeros by a mask, its flag travels in the announcement, and what codecs keep goes back by `torch.where`,
at once and on all ranks alike. The host reads the announcements an exchange later, or when it is asked
(`settle`); at once only on a rank that has members without a gradient, whose fate is the optimizer's business.
See [Note: no wait for a device] in `device.streams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..autotune.probe_request import ProbeRequest
from ..codecs.registry import CodecInstance
from ..device.streams import HostCopy, Streams
from ..gradients.parameters import Layout
from ..messages.message import Message, Reduction
from ..routes.route import Route
from ..transport.stream_conductor import StreamWork
from .coded_bucket import BucketFlags, CodedBucket

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

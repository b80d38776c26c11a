"""The units of a tensor that a codec is given, segments or matrices: where they lie, and what it keeps for each.

`UnitStates` is the one place where states are made, replaced and restored: the buckets of the reducer, codec
sessions and named operations keep these. `CodedFlat` lays several tensors out side by side: buckets and codec
sessions are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..device.streams import streams_of
from ..messages import Encoded, Encoding, GroupRank, Message
from ..transport.comm_thread import ITEM_TAGS, SegmentWork
from ..transport.rank_group import RankGroup, Within
from .codec import finite_flag, is_finite, leaves, with_leaves, without_overflow
from .registry import CodecInstance

# How a flat tensor is cut into the segments that codecs get.

SEGMENT_ELEMENTS = 512 * 1024
"""Elements of a segment that each rank adds up: large enough that calls cost little beside memory (measured)."""
MULTIPLE = 1024
"""Each rank's part of a segment is whole blocks of all codecs' default sizes."""


def segment_elements(total: int, ranks: int, most: int) -> int:
    """Return the elements of a segment of `total` elements, so that there are at most `most` segments."""
    multiple = MULTIPLE * ranks
    return max(SEGMENT_ELEMENTS * ranks, -(-total // (most * multiple)) * multiple)


# Several encodings side by side as one: their messages travel together.
def fuse(encodings: Sequence[Encoding]) -> Generator[Message, torch.Tensor, list[Encoded]]:
    """Run `encodings`, whose messages are all ``all_reduce``, with one message a round.

    Two hundred matrices then cost two rounds, not four hundred. Returns what each one does.
    """
    results: list[Encoded | None] = [None] * len(encodings)
    received: list[torch.Tensor | None] = [None] * len(encodings)
    waiting = list(range(len(encodings)))
    while True:
        messages: list[tuple[int, Message]] = []
        for index in waiting:
            tensor = received[index]
            try:
                message = next(encodings[index]) if tensor is None else encodings[index].send(tensor)
            except StopIteration as end:
                results[index] = end.value
            else:
                if message.operation != "all_reduce":
                    raise ValueError(f"a matrix codec yielded {message.operation!r}, expected only 'all_reduce'")
                messages.append((index, message))
        if not messages:
            return [result for result in results if result is not None]
        total = yield Message(torch.cat([message.tensor.reshape(-1) for _, message in messages]), "all_reduce")
        offset = 0
        for index, message in messages:
            count = message.tensor.numel()
            received[index] = total[offset : offset + count].view(message.tensor.shape)
            offset += count
        waiting = [index for index, _ in messages]


class UnitStates:
    """The states of a codec by number of unit, now and before the last exchange."""

    def __init__(self, codec: CodecInstance, group: GroupRank) -> None:
        self.codec = codec
        self.group = group
        self.current: dict[int, Any] = {}
        self._before: dict[int, Any] = {}

    def begin(self, k: int, unit: torch.Tensor) -> bool:
        """Prepare for an exchange of unit `k`; return False if its state overflowed, and begins anew.

        See [Note: sums that overflow] in `codecs.codec`.
        """
        state = self.current.get(k)
        is_sound = True
        if k not in self.current:
            state = self.codec.init(unit, self.group)
        elif self.codec.leaves_out:
            kept = state
            state = without_overflow(kept, lambda: self.codec.init(unit, self.group))
            is_sound = state is kept
        self.current[k] = self._before[k] = state
        return is_sound

    def begin_on_device(self, k: int, unit: torch.Tensor) -> torch.Tensor | None:
        """Do what `begin` does; return a flag there, () of bool, that is set where the state overflowed."""
        if k not in self.current or not self.codec.leaves_out:
            self.begin(k, unit)
            return None
        state = self.current[k]
        initial = leaves(self.codec.init(unit, self.group))
        pairs = [(kept, initial[key]) for key, kept in leaves(state).items() if isinstance(kept, torch.Tensor)]
        norms = [torch.linalg.vector_norm(kept, torch.inf) for kept, _ in pairs if kept.numel()]
        self._before[k] = state
        if not norms:
            return None
        overflowed = ~torch.isfinite(torch.stack(norms)).all()
        for kept, new in pairs:
            assert isinstance(new, torch.Tensor), "states of one codec are alike"
            torch.where(overflowed, new, kept, out=kept)  # in place, so that no memory is let go
        return overflowed

    def exchange(self, k: int, unit: torch.Tensor) -> Generator[Message, torch.Tensor, bool | torch.Tensor]:
        """Exchange unit `k` after `begin`, leaving the mean in `unit`; return its `finite_flag`."""
        finite, self.current[k] = yield from self.codec.exchange(unit, self.current[k], self.group)
        return finite

    def exchange_matrices(
        self, units: Sequence[torch.Tensor]
    ) -> Generator[Message, torch.Tensor, bool | torch.Tensor]:
        """Exchange all units after `begin`, in the messages of one."""
        results = yield from fuse(
            [self.codec.encode(unit, self.current[k], self.group) for k, unit in enumerate(units)]
        )
        finite: bool | torch.Tensor = True
        for k, (unit, (mean, _, state)) in enumerate(zip(units, results, strict=True)):
            unit.copy_(mean)
            finite = finite_flag(mean) & finite
            self.current[k] = state
        return finite

    def exchange_finite(
        self, k: int, unit: torch.Tensor, among: RankGroup | None = None
    ) -> Generator[Message | Within, torch.Tensor, bool]:
        """Do `begin` and `exchange` where all ranks' units are finite; return whether the mean is.

        If it is not, `unit` is filled with NaN on all ranks, and the state stays as it was. `among`: the ranks
        that must all have finite units, where those of the exchange have slices of a larger one: all of them then
        take part in as many rounds, see [Note: the same waits in the same order] in `transport.comm_thread`.
        """
        own = self.begin(k, unit) and is_finite(unit)
        finite = torch.full((1,), own, dtype=torch.bool, device=unit.device)
        question = Message(finite, "all_gather")
        if bool((yield question if among is None else Within(among, question)).all()):
            if (yield from self.exchange(k, unit)):
                return True
            self.restore(k)
        unit.fill_(torch.nan)
        return False

    def restore(self, k: int | None = None) -> None:
        """Keep what was kept before the last exchange of unit `k`, or of all units."""
        if k is None:
            self.current.update(self._before)
        else:
            self.current[k] = self._before[k]

    def restore_where(self, bad: torch.Tensor) -> None:
        """Keep the tensors of before the last exchange where `bad`, a flag on the device, is set.

        Numbers of a state, by which ranks draw alike, go on.
        """
        for k, state in self.current.items():
            before = leaves(self._before[k])
            for key, value in leaves(state).items():
                old = before[key]
                if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and value is not old:
                    torch.where(bad, old, value, out=value)

    def residual(self, k: int) -> torch.Tensor | None:
        """Return what was not sent yet of unit `k`, in its shape; None where the codec keeps no residual."""
        found = leaves(self.current[k]).get("residual")
        return found if isinstance(found, torch.Tensor) else None

    def load(self, k: int, unit: torch.Tensor, kept: dict[str, Any]) -> None:
        """Begin anew with the state of unit `k`, with tensors and numbers of `kept` where they fit."""
        state = self.codec.init(unit, self.group)
        own = leaves(state)
        fitting = {key: value for key, value in kept.items() if key in own and _fits(value, own[key])}
        self.current[k] = self._before[k] = with_leaves(state, fitting)

    def rescale(self, change: float) -> None:
        """Multiply residuals and velocities, which are linear in the gradients, by `change`."""
        for state in self.current.values():
            found = leaves(state)
            like = found.get("residual")
            for value in found.values():
                if not (isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor)):
                    continue
                if value.shape == like.shape and value.is_floating_point():
                    value.mul_(change)


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
            # Segments exist so that the wire and the CPU overlap; on a device each costs launches.
            whole = streams_of(like.device) is not None
            step = segment_elements(end - begin, len(group.ranks), ITEM_TAGS - 1)
            step = max(1, end - begin) if whole else step
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

    def work(
        self, units: Sequence[torch.Tensor], finish: Callable[[bool | torch.Tensor], None]
    ) -> list[SegmentWork]:
        """Return what exchanges `units` after `begin`, leaving the means there; see `UnitStates.exchange`."""
        if self.codec.granularity == "matrix":
            return [SegmentWork(partial(self.states.exchange_matrices, units), finish, self.group)]
        return [
            SegmentWork(partial(self.states.exchange, k, unit), finish, self.group) for k, unit in enumerate(units)
        ]


def _fits(value: Any, own: Any) -> bool:
    if isinstance(own, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.shape == own.shape
    return not isinstance(value, torch.Tensor)

"""What one codec keeps for the units of one tensor: the one place where states are made, replaced and restored.

A unit is a segment or a matrix. The buckets of the reducer, named operations and codec sessions all keep these.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ..codecs.codec import leaves, with_leaves
from ..codecs.finite import is_finite, without_overflow
from ..codecs.registry import CodecInstance
from ..messages.message import GroupRank, Message
from .batched import fuse


class UnitStates:
    """The states of a codec by number of unit, now and before the last exchange."""

    def __init__(self, codec: CodecInstance, group: GroupRank) -> None:
        self.codec = codec
        self.group = group
        self.current: dict[int, Any] = {}
        self._before: dict[int, Any] = {}

    def begin(self, k: int, unit: torch.Tensor) -> bool:
        """Prepare for an exchange of unit `k`; return False if its state overflowed, and begins anew.

        See [Note: sums that overflow] in `finite`.
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

    def exchange(self, k: int, unit: torch.Tensor) -> Generator[Message, torch.Tensor, bool]:
        """Exchange unit `k` after `begin`, leaving the mean in `unit`; return whether the mean is finite."""
        finite, self.current[k] = yield from self.codec.exchange(unit, self.current[k], self.group)
        return finite

    def exchange_matrices(self, units: Sequence[torch.Tensor]) -> Generator[Message, torch.Tensor, bool]:
        """Exchange all units after `begin`, in the messages of one."""
        results = yield from fuse(
            [self.codec.encode(unit, self.current[k], self.group) for k, unit in enumerate(units)]
        )
        finite = True
        for k, (unit, (mean, _, state)) in enumerate(zip(units, results, strict=True)):
            unit.copy_(mean)
            finite &= is_finite(mean)
            self.current[k] = state
        return finite

    def exchange_finite(self, k: int, unit: torch.Tensor) -> Generator[Message, torch.Tensor, bool]:
        """Do `begin` and `exchange` where all ranks' units are finite; return whether the mean is.

        If it is not, `unit` is filled with NaN on all ranks, and the state stays as it was.
        """
        finite = torch.tensor([self.begin(k, unit) and is_finite(unit)], dtype=torch.bool)
        if bool((yield Message(finite, "all_gather")).all()):
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


def _fits(value: Any, own: Any) -> bool:
    if isinstance(own, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.shape == own.shape
    return not isinstance(value, torch.Tensor)

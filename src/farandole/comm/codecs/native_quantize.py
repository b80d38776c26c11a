"""Quantised codecs with error feedback by native loops, which read and write each number once a round.

What travels, the mean and the residual have the bits of `feedback.error_feedback(quantise.quantised(packer))`: a
rank without a compiler runs that, and they meet in one exchange. Before first use this is tried on some numbers,
because the compiler is whatever this host has.

[Note: the residual comes last] An exchange that fails must leave the residual as it was. Until the last round what
will be the residual lies where the gradient was; then it is moved, in the pass that writes the mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch

from ..messages.message import Exchange, GroupRank, Message, State
from ..native.kernels import LARGEST_BLOCK, Format, Kernels, loops
from .error_feedback import error_feedback
from .finite import is_finite
from .packing import BFloat16, Float16, Integers
from .quantize import Packer, quantised
from .rollback import room_for_residual

_BFLOAT_BLOCK = 256
"""Elements at a time of a format without blocks."""


@dataclass(frozen=True)
class Fused:
    """One format's loops. Called like a codec, it leaves the mean in the gradient's place: an `Exchange`."""

    how: Format
    packer: Packer
    block: int
    loops: Kernels

    def fits(self, unit: torch.Tensor, state: State, seat: GroupRank) -> bool:
        """Return whether `unit` and its residual are what the loops take: whole blocks on the processor."""
        residual = state.get("residual", unit)
        return (
            unit.numel() > 0 and unit.numel() % (self.block * seat.size) == 0 and _plain(unit) and _plain(residual)
        )

    def __call__(self, unit: torch.Tensor, state: State, seat: GroupRank) -> Exchange:
        """Exchange `unit`, which `fits`."""
        if "residual" not in state:
            state["residual"] = torch.zeros_like(unit)
        values, residual = unit.view(seat.size, -1), state["residual"].view(seat.size, -1)
        length = self.packer.packed_bytes(values.shape[1])
        packed = torch.empty(seat.size, -(-length // 4) * 4, dtype=torch.uint8)
        for row in range(seat.size):
            if row != seat.rank:
                self.loops.encode(self.how, values[row], residual[row], packed[row], block=self.block)
        pieces = (yield Message(packed, "exchange")).contiguous()
        summary = torch.empty_like(packed[0])
        mine = seat.rank
        self.loops.add_up(self.how, values[mine], residual[mine], pieces, summary, mine=mine, block=self.block)
        everyone = (yield Message(summary, "gather")).contiguous()
        kept = room_for_residual(state)
        finite = True
        for row, next_residual in enumerate(kept.view(seat.size, -1)):
            finite &= self.loops.land(self.how, everyone[row], values[row], next_residual, block=self.block)
        state["residual"] = kept
        return finite


def fused(packer: Packer) -> Fused | None:
    """Return the loops for `packer`; None where there are none, or they do not compute what they must."""
    how: Format
    if isinstance(packer, BFloat16):
        how, block = "bf16", _BFLOAT_BLOCK
    elif isinstance(packer, Float16):
        how, block = "fp16", packer.block
    elif isinstance(packer, Integers) and not packer.stochastic:  # whose draws are torch's
        how, block = ("int8" if packer.bits == 8 else "int4"), packer.block
    else:
        return None
    native = loops() if block <= LARGEST_BLOCK else None
    return None if native is None else _tried(how, packer, block, native)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype == torch.float32 and tensor.dim() == 1 and tensor.is_contiguous()


@cache
def _tried(how: Format, packer: BFloat16 | Float16 | Integers, block: int, native: Kernels) -> Fused | None:
    """Return the loops if they give the eager code's bits."""
    made = Fused(how, packer, block, native)
    codec = error_feedback(quantised(packer))

    def eager(unit: torch.Tensor, state: State, seat: GroupRank) -> Exchange:
        mean, _ = yield from codec(unit, state, seat)
        unit.copy_(mean)
        return is_finite(mean)

    pairs = zip(_seen(made, 9 * block), _seen(eager, 9 * block), strict=True)
    if all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs):
        return made
    logging.getLogger("farandole").debug("no native loops for %s: other bits than the eager code's", how)
    return None


def _seen(exchange: Callable[[torch.Tensor, State, GroupRank], Exchange], count: int) -> list[torch.Tensor]:
    """Return all that the middle one of three ranks sends and keeps in three steps of `count` numbers."""
    seen: list[torch.Tensor] = []
    state: State = {}
    generator = torch.Generator().manual_seed(1)
    for power in (1.0, 1e30, 1e-30):
        unit = torch.randn(count, dtype=torch.float32, generator=generator) * power
        talk = exchange(unit, state, GroupRank(1, 3))
        first = next(talk).tensor[[0, 2]]  # the row between them travels nowhere
        second = talk.send(first[[0, 0, 1]]).tensor
        with suppress(StopIteration):
            talk.send(second.expand(3, -1))
        seen += [first, second.clone(), unit, state["residual"].clone()]
    return seen

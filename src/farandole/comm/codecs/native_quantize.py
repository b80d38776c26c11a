"""Quantised codecs with error feedback by native loops, which read and write each number once a round.

What travels, the mean and the residual have the bits of ``ErrorFeedback(Quantized(packer))``: a
rank without a compiler runs that, and they meet in one exchange. Before first use this is tried on some numbers,
because the compiler is whatever this host has.

[Note: the residual comes last] An exchange that fails must leave the residual as it was. Until the last round what
will be the residual lies where the gradient was; then it is moved, in the pass that writes the mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ..messages.message import Exchange, Exchanged, GroupRank, Message
from ..native.kernels import LARGEST_BLOCK, Format, Kernels, loops, packed_bytes
from .error_feedback import ErrorFeedback, FeedbackState
from .finite import is_finite
from .packing import BFloat16, Float16, Integers
from .quantize import Packer, Quantized

_BFLOAT_BLOCK = 256
"""Elements at a time of a format without blocks."""


@dataclass(frozen=True)
class NativeQuantize:
    """``ErrorFeedback(Quantized(packer))`` by native loops; leaves the mean in the gradient's place."""

    how: Format
    block: int
    loops: Kernels

    def fits(self, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> bool:
        """Return whether `unit` and its residual are what the loops take: whole blocks on the CPU."""
        whole_blocks = unit.numel() > 0 and unit.numel() % (self.block * group.size) == 0
        return whole_blocks and _plain(unit) and _plain(state.residual) and _plain(state.spare)

    def exchange(self, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> Exchange:
        """Exchange `unit`, which `fits`."""
        values, residual = unit.view(group.size, -1), state.residual.view(group.size, -1)
        length = packed_bytes(self.how, values.shape[1], self.block)
        packed = torch.empty(group.size, -(-length // 4) * 4, dtype=torch.uint8)
        for row in range(group.size):
            if row != group.rank:
                self.loops.encode(self.how, values[row], residual[row], packed[row], block=self.block)
        pieces = (yield Message(packed, "all_to_all")).contiguous()
        summary = torch.empty_like(packed[0])
        mine = group.rank
        self.loops.add_up(self.how, values[mine], residual[mine], pieces, summary, mine=mine, block=self.block)
        summaries = (yield Message(summary, "all_gather")).contiguous()
        finite = True
        for row, next_residual in enumerate(state.spare.view(group.size, -1)):
            finite &= self.loops.land(self.how, summaries[row], values[row], next_residual, block=self.block)
        return Exchanged(finite, FeedbackState(state.spare, state.residual, state.codec))


def native_quantize(packer: Packer) -> NativeQuantize | None:
    """Return the loops for `packer`; None where there are none, or their results have other bits."""
    if packer.stochastic:  # its draws are torch's
        return None
    how: Format
    if isinstance(packer, BFloat16):
        how, block = "bf16", _BFLOAT_BLOCK
    elif isinstance(packer, Float16):
        how, block = "fp16", packer.block
    elif isinstance(packer, Integers):
        how, block = ("int8" if packer.bits == 8 else "int4"), packer.block
    else:
        return None
    native = loops() if block <= LARGEST_BLOCK else None
    return None if native is None else _tried(how, packer, block, native)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype == torch.float32 and tensor.dim() == 1 and tensor.is_contiguous()


@cache
def _tried(
    how: Format, packer: BFloat16 | Float16 | Integers, block: int, native: Kernels
) -> NativeQuantize | None:
    """Return the loops if they give the eager code's bits."""
    made = NativeQuantize(how, block, native)
    codec = ErrorFeedback(Quantized(packer))

    def eager(unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> Exchange:
        mean, _, state = yield from codec.encode(unit, state, group)
        unit.copy_(mean)
        return Exchanged(is_finite(mean), state)

    first = codec.init(torch.empty(9 * block, dtype=torch.float32), GroupRank(1, 3))
    pairs = zip(_seen(made.exchange, first), _seen(eager, first), strict=True)
    if all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs):
        return made
    logging.getLogger("farandole").debug("no native loops for %s: other bits than the eager code's", how)
    return None


def _seen(
    exchange: Callable[[torch.Tensor, FeedbackState, GroupRank], Exchange], state: FeedbackState
) -> list[torch.Tensor]:
    """Return all that the middle one of three ranks sends and keeps in three steps."""
    seen: list[torch.Tensor] = []
    state = FeedbackState(state.residual.clone(), state.spare.clone(), state.codec)
    generator = torch.Generator().manual_seed(1)
    for power in (1.0, 1e30, 1e-30):
        unit = torch.randn(state.residual.numel(), dtype=torch.float32, generator=generator) * power
        rounds = exchange(unit, state, GroupRank(1, 3))
        first = next(rounds).tensor[[0, 2]]  # the row between them is not sent
        second = rounds.send(first[[0, 0, 1]]).tensor
        try:
            rounds.send(second.expand(3, -1))
        except StopIteration as end:
            state = end.value.state
        seen += [first, second.clone(), unit, state.residual.clone()]
    return seen

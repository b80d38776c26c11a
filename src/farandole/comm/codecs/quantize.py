"""Quantised codecs: reduce-scatter + all-gather of packed numbers.

Each rank packs one piece for every other rank; a rank unpacks the pieces it receives, adds them in
float32, packs the sum, and all ranks gather the packed sums. Bytes sent by a rank: 2 (N-1)/N of the
packed size, whatever N is. What packing means is the `Packer`'s business.

[Note: my own piece is exact] A rank's contribution to the piece it adds up itself needs no packing. What
is lost there is the rounding of the sum, which is this rank's to remember: see [Note: conservation].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count as count_from
from itertools import repeat
from typing import NamedTuple, Protocol

import torch

from ..messages import Encoded, Encoding, Exchange, Exchanged, GroupRank, Message
from ..native.build import LARGEST_BLOCK, Format, Kernels, loops
from .codec import ErrorFeedback, FeedbackState, is_finite
from .packing import BFloat16, Float16, Integers


class Packer(Protocol):
    """Numbers to bytes and back. Works on whole blocks."""

    @property
    def block(self) -> int:
        """Elements a packed block stands for; pieces are whole blocks."""

    @property
    def stochastic(self) -> bool:
        """Whether it rounds at random."""

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of `count` packed elements."""

    def pack(self, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        """Pack 1-D float32 `values` into `packed` (uint8). `seed`: of the random numbers of this call."""

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Write the numbers that `packed` stands for."""


class Draws(NamedTuple):
    """What stochastic rounding keeps: which random numbers come next."""

    seed: int
    """Another one on each rank: ranks that rounded by the same draws would err alike, and their mean as much."""
    draws: int = 0
    """Tables drawn so far."""


def _seeds(state: Draws | None) -> Iterator[int]:
    """Return the seeds of the draws that follow; zeros where none is needed."""
    return repeat(0) if state is None else (state.seed * 1_000_003 + k for k in count_from(state.draws + 1))


@dataclass(frozen=True)
class Quantized:
    """Exchanges what `packer` packs."""

    packer: Packer

    def init(self, grad: torch.Tensor, group: GroupRank) -> Draws | None:
        """See `Codec`."""
        return Draws(group.rank + 1) if self.packer.stochastic else None

    def encode(self, grad: torch.Tensor, state: Draws | None, group: GroupRank) -> Encoding:
        """See `Codec`."""
        count = grad.numel()
        piece = piece_elements(count, self.packer.block, group.size)
        asked = grad
        if piece * group.size != count:
            asked = torch.cat([grad, grad.new_zeros(piece * group.size - count)])
        rows = asked.view(group.size, piece)
        own = torch.empty_like(rows)
        length = self.packer.packed_bytes(piece)
        # Rows begin at multiples of 4 bytes, where a scale can be read.
        packed = torch.empty(group.size, -(-length // 4) * 4, dtype=torch.uint8, device=grad.device)
        seeds = _seeds(state)
        for row in range(group.size):
            if row != group.rank:
                self.packer.pack(rows[row], packed[row, :length], next(seeds))
                self.packer.unpack(packed[row, :length], own[row])
        pieces = yield Message(packed, "all_to_all")
        mine = rows[group.rank]
        total, spare = own[group.rank], torch.empty_like(mine)
        # Any order gives equal bits on all ranks, because one rank alone adds this piece up.
        added = mine
        for row in range(group.size):
            if row != group.rank:
                self.packer.unpack(pieces[row, :length], spare)
                added = torch.add(added, spare, out=total)
        torch.mul(added, 1 / group.size, out=total)
        summary = torch.empty(packed.shape[1], dtype=torch.uint8, device=grad.device)
        self.packer.pack(total, summary[:length], next(seeds))
        summaries = yield Message(summary, "all_gather")
        mean = torch.empty_like(rows)
        for row in range(group.size):
            self.packer.unpack(summaries[row, :length], mean[row])
        # Not by `alpha`, which is fused or not depending on the CPU: see `NativeQuantize`.
        total.sub_(mean[group.rank]).mul_(group.size)
        torch.sub(mine, total, out=total)  # `total` is own's row
        if state is not None:
            state = Draws(state.seed, state.draws + group.size)
        return Encoded(mean.view(-1)[:count], own.view(-1)[:count], state)


def piece_elements(count: int, block: int, size: int) -> int:
    """Return the elements each of `size` ranks adds up: whole blocks, enough for `count`.

    >>> piece_elements(1000, 256, 2)
    512
    """
    return max(1, -(-count // (block * size))) * block


# Quantised codecs with error feedback by native loops, which read and write each number once a round.
#
# What travels, the mean and the residual have the bits of ``ErrorFeedback(Quantized(packer))``: a rank without a
# compiler runs that, and they meet in one exchange. Before first use this is tried on some numbers, because the
# compiler is whatever this host has.
#
# [Note: the residual comes last] An exchange that fails must leave the residual as it was. Until the last round
# what will be the residual lies where the gradient was; then it is moved, in the pass that writes the mean.
#
# [Note: where loops write] Loops get an address and a count, and would write beyond the end of anything else. So
# an exchange looks once at what it was given, and at all that it receives; the rest is made here.


_BFLOAT_BLOCK = 256
"""Elements at a time of a format without blocks."""
Eager = Callable[[torch.Tensor, FeedbackState, GroupRank], Exchange]
"""Exchanges a unit."""


@dataclass(frozen=True)
class NativeQuantize:
    """``ErrorFeedback(Quantized(packer))`` by native loops; leaves the mean in the gradient's place."""

    how: Format
    packer: BFloat16 | Float16 | Integers
    block: int
    """Elements at a time."""
    kernels: Kernels

    def fits(self, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> bool:
        """Return whether `unit` and its residuals are what the loops take: whole blocks on the CPU."""
        count = unit.numel()
        whole_blocks = count > 0 and count % (self.block * group.size) == 0
        return whole_blocks and all(_plain(each, count) for each in (unit, state.residual, state.spare))

    def exchange_or(self, eager: Eager, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> Exchange:
        """Exchange `unit`, by `eager` if it does not fit the loops."""
        return self.exchange(unit, state, group) if self.fits(unit, state, group) else eager(unit, state, group)

    def exchange(self, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> Exchange:
        """Exchange `unit`. Raises `ValueError` unless it `fits`; see [Note: where loops write]."""
        if not self.fits(unit, state, group):
            raise ValueError(f"native loops: {unit.dtype} of shape {tuple(unit.shape)}, expected what `fits`")
        loops, block, mine = self.kernels.of_format[self.how], self.block, group.rank
        values, residuals = unit.view(group.size, -1), state.residual.view(group.size, -1)
        count = values.shape[1]
        packed = torch.empty(group.size, _row_bytes(self.packer, count), dtype=torch.uint8)
        rows = list(zip(values, residuals, state.spare.view(group.size, -1), packed, strict=True))
        for row, (value, residual, _, piece) in enumerate(rows):
            if row != mine:
                loops.encode(value.data_ptr(), residual.data_ptr(), piece.data_ptr(), count, block)
        pieces = received_rows((yield Message(packed, "all_to_all")), packed, "native loops")
        summary = torch.empty_like(packed[0])
        value, residual, _, _ = rows[mine]
        loops.add_up(
            value.data_ptr(), residual.data_ptr(), pieces.data_ptr(), pieces.stride(0), mine, group.size,
            summary.data_ptr(), count, block,
        )  # fmt: skip
        summaries = received_rows((yield Message(summary, "all_gather")), packed, "native loops")
        finite = True
        for (value, _, next_residual, _), piece in zip(rows, summaries, strict=True):
            finite &= bool(loops.land(piece.data_ptr(), value.data_ptr(), next_residual.data_ptr(), count, block))
        return Exchanged(finite, FeedbackState(state.spare, state.residual, state.codec))


def native_quantize(packer: Packer) -> NativeQuantize | None:
    """Return the loops for `packer`; None where there are none, or their results have other bits."""
    if packer.stochastic:  # its draws are torch's
        return None
    how: Format
    if isinstance(packer, Integers):
        how = "int8" if packer.bits == 8 else "int4"
    elif isinstance(packer, BFloat16 | Float16):
        how = "bf16" if isinstance(packer, BFloat16) else "fp16"
    else:
        return None
    block = _BFLOAT_BLOCK if isinstance(packer, BFloat16) else packer.block
    native = loops() if block <= LARGEST_BLOCK else None
    return None if native is None else _tried(NativeQuantize(how, packer, block, native))


def _plain(tensor: torch.Tensor, count: int) -> bool:
    is_float = tensor.is_cpu and tensor.dtype == torch.float32 and tensor.layout == torch.strided
    return is_float and tensor.shape == (count,) and tensor.is_contiguous()


@lru_cache(maxsize=1024)
def _row_bytes(packer: BFloat16 | Float16 | Integers, count: int) -> int:
    """Return the bytes of `count` packed numbers, in whole words."""
    return -(-packer.packed_bytes(count) // 4) * 4


def received_rows(rows: torch.Tensor, like: torch.Tensor, reader: str) -> torch.Tensor:
    """Return what has arrived for `reader`, contiguous; raise `ValueError` if it is not of the kind of `like`."""
    if rows.shape != like.shape or rows.dtype != like.dtype or rows.device != like.device:
        raise ValueError(
            f"{reader}: received {rows.dtype} of shape {tuple(rows.shape)} on {rows.device.type}, "
            f"expected {like.dtype} of shape {tuple(like.shape)} on {like.device.type}"
        )
    return rows.contiguous()


@cache
def _tried(made: NativeQuantize) -> NativeQuantize | None:
    """Return the loops if they give the eager code's bits."""
    packer, block = made.packer, made.block
    group = GroupRank(1, 3)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3, 9 * block, dtype=torch.float32, generator=generator)
    units = [unit * power for unit, power in zip(drawn, (1.0, 1e30, 1e-30), strict=True)]
    pairs = zip(
        trial_results(made.exchange, units, group),
        trial_results(eager_exchange(packer), units, group),
        strict=True,
    )
    if all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs):
        return made
    logging.getLogger("farandole").debug("no native loops for %s: other bits than the eager code's", made.how)
    return None


def eager_exchange(packer: Packer) -> Eager:
    """Return what kernels of `packer` are compared with: the eager codec with error feedback."""
    codec = ErrorFeedback(Quantized(packer))

    def eager(unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> Exchange:
        mean, _, state = yield from codec.encode(unit, state, group)
        unit.copy_(mean)
        return Exchanged(is_finite(mean), state)

    return eager


def trial_results(exchange: Eager, units: Sequence[torch.Tensor], group: GroupRank) -> list[torch.Tensor]:
    """Exchange copies of `units` in as many steps, alone; return all that this rank sends, gets and keeps in each.

    The other ranks' messages are made of this rank's own. There is no residual at first.
    """
    results: list[torch.Tensor] = []
    sources = [row if row != group.rank else (row + 1) % group.size for row in range(group.size)]
    state = FeedbackState(torch.zeros_like(units[0]), torch.zeros_like(units[0]), None)
    for each in units:
        unit = each.clone()
        rounds = exchange(unit, state, group)
        pieces = next(rounds).tensor
        others = [pieces[row].clone() for row in range(group.size) if row != group.rank]  # its own is not sent
        summary = rounds.send(torch.stack([pieces[row] for row in sources])).tensor
        try:
            rounds.send(summary.expand(group.size, -1))
        except StopIteration as end:
            finite, state = end.value
        results += [*others, summary.clone(), unit, state.residual.clone()]
        results.append(torch.as_tensor(finite, dtype=torch.bool))
    return results

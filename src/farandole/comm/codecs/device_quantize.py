"""int8 and int4 with error feedback on an accelerator, by kernels of Triton: three launches an exchange.

What travels, the mean and the residual have the bits of ``ErrorFeedback(Quantized(packer))`` on the CPU, so ranks
with kernels and without them meet in one exchange.

[Note: kernels are tried first] What Triton makes of a kernel depends on its version and on the device. So before
the first exchange of a format in a group each kernel runs on fixed numbers, and all that it writes is compared
with the eager codec on the CPU. If one does not compile, or a bit differs, no kernel is used in this process from
then on: a notice says so, and the eager codec runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ...core.env import native_loops_are_wanted
from ...core.vocabulary.text import write_notice
from ..device.block_launches import LARGEST_BLOCK, MOST_BYTES, BlockKernels, can_run
from ..device.streams import streams_of
from ..messages import Exchange, Exchanged, GroupRank, Message
from .codec import FeedbackState
from .packing import Integers, parts_of
from .quantize import Eager, Packer, eager_exchange, piece_elements, received_rows, trial_results

_READER = "Triton kernels"
_TRIAL_BLOCKS = 9
"""At least so many has each half of a piece: with blocks of 256, one more than a program takes."""


@dataclass(frozen=True)
class DeviceQuantize:
    """``ErrorFeedback(Quantized(packer))`` by kernels; leaves the mean in the gradient's place."""

    packer: Integers

    def prepare(self, device: torch.device, group: GroupRank) -> None:
        """Compile and try the kernels, if `device` is an accelerator; see [Note: kernels are tried first]."""
        if streams_of(device) is not None:
            _trials.passed(self, device, group)

    def exchange_or(self, eager: Eager, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> Exchange:
        """Exchange `unit`, by `eager` if it does not fit the kernels or they cannot be used."""
        is_fit = self.fits(unit, state, group) and _trials.passed(self, unit.device, group)
        return self.exchange(unit, state, group) if is_fit else eager(unit, state, group)

    def fits(self, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> bool:
        """Return whether `unit` and its residuals are what the kernels take: 1-D float32 on an accelerator.

        A piece of int4 has an even number of blocks: see [Note: halves of a piece] in `device.block_kernels`.
        """
        device, count = unit.device, unit.numel()
        if not count or streams_of(device) is None:
            return False
        piece = piece_elements(count, self.packer.block, group.size)
        is_small = group.size * piece <= MOST_BYTES and group.size * self.packer.packed_bytes(piece) <= MOST_BYTES
        is_even = piece // self.packer.block % self.kernels.halves == 0
        return is_small and is_even and all(_plain(each, unit) for each in (unit, state.residual, state.spare))

    def exchange(self, unit: torch.Tensor, state: FeedbackState, group: GroupRank) -> Exchange:
        """Exchange `unit`, which `fits`. The residual stays as it was; the next one is written into `state.spare`.

        Raises `ValueError` for messages of another kind than was sent.
        """
        size, own_row = group.size, group.rank
        piece = piece_elements(unit.numel(), self.packer.block, size)
        residual, next_residual, kernels = state.residual, state.spare, self.kernels
        packed = torch.empty(size, self.packer.packed_bytes(piece), dtype=torch.uint8, device=unit.device)
        kernels.encode(unit, residual, next_residual, packed, own_row=own_row)
        pieces = received_rows((yield Message(packed, "all_to_all")), packed, _READER)
        summary = torch.empty_like(packed[0])
        kernels.add_up(unit, residual, next_residual, pieces, summary, own_row=own_row)
        summaries = received_rows((yield Message(summary, "all_gather")), packed, _READER)
        is_finite = kernels.land(unit, summaries)
        return Exchanged(is_finite, FeedbackState(next_residual, residual, state.codec))

    @cached_property
    def kernels(self) -> BlockKernels:
        """The kernels of this format, which may not be there."""
        return BlockKernels(self.packer.bits, self.packer.block)


def device_quantize(packer: Packer) -> DeviceQuantize | None:
    """Return what exchanges numbers of `packer` by kernels; None for formats without them. Imports no Triton."""
    if not isinstance(packer, Integers) or packer.stochastic or packer.block > LARGEST_BLOCK:
        return None
    return DeviceQuantize(packer)


def _plain(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    is_float = tensor.dtype == torch.float32 and tensor.layout == torch.strided
    return is_float and tensor.device == like.device and tensor.shape == (like.numel(),) and tensor.is_contiguous()


class _Trials:
    """What was tried in this process. See [Note: kernels are tried first]."""

    def __init__(self) -> None:
        self.is_off = False
        self._has_passed: dict[tuple[DeviceQuantize, torch.device, GroupRank], bool] = {}

    def passed(self, made: DeviceQuantize, device: torch.device, group: GroupRank) -> bool:
        """Return whether kernels may be used, after a trial where there was none yet."""
        key = made, device, group
        if key not in self._has_passed:
            can_be_tried = not self.is_off and native_loops_are_wanted() and can_run(device)
            self._has_passed[key] = can_be_tried and self._try(made, device, group)
        return self._has_passed[key] and not self.is_off

    def _try(self, made: DeviceQuantize, device: torch.device, group: GroupRank) -> bool:
        try:
            is_right, reason = _has_eager_bits(made, device, group), "their results differ from the codec's"
        except Exception as problem:  # of a compiler, in any form
            first_line = next(iter(str(problem).splitlines()), "")
            is_right, reason = False, f"{type(problem).__name__}: {first_line}"
        if not is_right:
            self.is_off = True
            write_notice(
                f"Triton kernels of codec int{made.packer.bits} are not used on {device}, nor are others in this "
                f"process: {reason}. Codecs run as operations of torch, which are slower"
            )
        return is_right


_trials = _Trials()


def _has_eager_bits(made: DeviceQuantize, device: torch.device, group: GroupRank) -> bool:
    eager = eager_exchange(made.packer)
    for units in _trial_units(made, group):
        ours = trial_results(made.exchange, [unit.to(device) for unit in units], group)
        theirs = trial_results(eager, units, group)
        for one, other in zip(ours, theirs, strict=True):
            pairs = zip(_parts(one.cpu(), made.packer), _parts(other, made.packer), strict=True)
            if not all(torch.equal(part, expected) for part, expected in pairs):
                return False
    return True


def _trial_units(made: DeviceQuantize, group: GroupRank) -> list[list[torch.Tensor]]:
    """Return sequences of units that are exchanged one after the other: whole blocks, and some numbers less.

    Ties of rounding, numbers of one size and of all, zeros, numbers below the normal ones, NaN and infinity; and
    numbers whose sum over the ranks is infinite.
    """
    block, top = made.packer.block, made.packer.top
    blocks = _TRIAL_BLOCKS + 8 * _TRIAL_BLOCKS // group.size
    whole = group.size * made.kernels.halves * blocks * block
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3, whole, dtype=torch.float32, generator=generator)
    ties = torch.randint(-2 * top, 2 * top + 1, (whole,), dtype=torch.int32, generator=generator) / 2
    ties[::block] = top  # the step of each block is 1
    mixed = drawn[0] * 10.0 ** (torch.rand(whole, dtype=torch.float32, generator=generator) * 80 - 44)
    mixed[block : 2 * block] = 0.0
    mixed[: block // 2] = -0.0
    endless = drawn[1].clone()
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        endless[place * whole // 3 + 5] = value
    # By block 1e-34 to 1e-39: steps around the smallest that is sent, and numbers below the normal ones.
    blocks_before = torch.arange(whole, dtype=torch.float32).div(block, rounding_mode="floor")
    tiny = drawn[0] * 10.0 ** (-34 - blocks_before % 6)
    steps = [ties.to(torch.float32), drawn[2], mixed, endless]
    short = whole - block // 2 - 1
    return [steps, [unit[:short] for unit in steps[:3]], [tiny], [drawn[0].sign() * 3e38]]


def _parts(result: torch.Tensor, packer: Integers) -> list[torch.Tensor]:
    """Return the bytes of a result, with one NaN for all; scales and numbers of a packed one."""
    parts = list(parts_of(result, packer.bits, packer.block)) if result.dtype == torch.uint8 else [result]
    return [
        torch.where(part.isnan(), torch.nan, part).view(torch.int32) if part.is_floating_point() else part
        for part in parts
    ]

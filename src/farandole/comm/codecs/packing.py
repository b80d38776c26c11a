"""How numbers become bytes: 16- and 8-bit floats, 8- and 4-bit integers in blocks, signs.

Every packed piece is laid out as [scales][numbers]. Scales are float32, one a block. A block of zeros packs
to zeros; a scale that underflows packs its block to zeros (the residual keeps it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...core.vocabulary.codec_spec import BFLOAT16, FLOAT16, PackedFormat

_NOISE_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class BFloat16:
    """Brain floats: 2 bytes, no scale, never overflows where float32 does not."""

    block: int = BFLOAT16.block
    stochastic: ClassVar[bool] = False

    def packed_bytes(self, count: int) -> int:
        """See `Packer`."""
        return BFLOAT16.packed_bytes(count)

    def pack(self, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        """See `Packer`."""
        packed.view(torch.bfloat16).copy_(values)

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """See `Packer`."""
        values.copy_(packed.view(torch.bfloat16))


@dataclass(frozen=True)
class Float16:
    """IEEE half floats after scaling each block to the format's range: 10 bits of mantissa, no overflow."""

    block: int = FLOAT16.block
    stochastic: ClassVar[bool] = False

    def packed_bytes(self, count: int) -> int:
        """See `Packer`."""
        return FLOAT16.packed_bytes(count)

    def pack(self, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        """See `Packer`."""
        scales, numbers = self._parts(packed)
        rows = values.view(-1, self.block)
        # Powers of two: scaling loses nothing.
        _, exponents = torch.frexp(rows.abs().amax(1, keepdim=True))
        steps = torch.ldexp(torch.ones_like(scales), (exponents.view(-1) - 14).clamp_(-120, 120))
        scales.copy_(steps)
        numbers.copy_(rows / steps.view(-1, 1))

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """See `Packer`."""
        scales, numbers = self._parts(packed)
        rows = values.view(-1, self.block)
        rows.copy_(numbers)
        rows.mul_(scales.view(-1, 1))

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, numbers = parts_of(packed, 16, self.block)
        return scales, numbers.view(torch.float16).view(-1, self.block)


@dataclass(frozen=True)
class Integers:
    """Integers of 8 or 4 bits, symmetric, scaled by the largest magnitude of each block.

    Sources: Alistarh et al., "QSGD", NeurIPS 2017 (stochastic rounding); Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization", ICLR 2022 (blocks).
    """

    bits: int
    block: int = 256
    stochastic: bool = False

    @property
    def top(self) -> int:
        """Largest integer: 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    def packed_bytes(self, count: int) -> int:
        """See `Packer`."""
        return PackedFormat(self.bits, self.block).packed_bytes(count)

    def pack(self, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        """See `Packer`."""
        scales, numbers = self._parts(packed)
        rows = values.view(-1, self.block)
        work = _in_steps(rows, scales, self.top)
        if self.stochastic:
            work.add_(_noise(work, seed)).floor_().clamp_(-self.top, self.top)
        else:
            work.round_()
        if self.bits == 8:
            numbers.copy_(work.view(-1))
        else:
            # The first half of the piece in the low nibbles, the second half in the high ones, both signed.
            low, high = work.view(-1).to(torch.int8).chunk(2)
            torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=numbers)

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """See `Packer`."""
        scales, numbers = self._parts(packed)
        rows = values.view(-1, self.block)
        if self.bits == 8:
            values.copy_(numbers)
        else:
            low, high = values.chunk(2)
            high.copy_(numbers >> 4)  # keeps the sign
            low.copy_((numbers << 4) >> 4)
        rows.mul_(scales.view(-1, 1))

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, numbers = parts_of(packed, self.bits, self.block)
        return scales, numbers.view(torch.int8)


@dataclass(frozen=True)
class Float8:
    """Floats of 8 bits (e4m3fn: 4 bits of each number), scaled by the largest magnitude of each block.

    Numbers down to 1/28,672 of the largest have 4 bits, rounded to nearest; smaller ones have less. The format has
    NaN and no infinity; a number is at most `top` steps, but for rounding, and NaN begins at 464. A block with NaN
    or infinity is received as NaN.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """

    block: int = 256
    stochastic: ClassVar[bool] = False
    top: ClassVar[float] = 448.0

    def packed_bytes(self, count: int) -> int:
        """See `Packer`."""
        return PackedFormat(8, self.block).packed_bytes(count)

    def pack(self, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        """See `Packer`."""
        scales, numbers = self._parts(packed)
        work = _in_steps(values.view(-1, self.block), scales, self.top)
        numbers.copy_(work.view(-1))

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """See `Packer`."""
        scales, numbers = self._parts(packed)
        values.copy_(numbers)
        values.view(-1, self.block).mul_(scales.view(-1, 1))

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, numbers = parts_of(packed, 8, self.block)
        return scales, numbers.view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Signs:
    """One bit a number, and the mean magnitude of each block.

    Source: Karimireddy et al., ICML 2019 (scaled sign).
    """

    block: int = 512
    stochastic: ClassVar[bool] = False

    def packed_bytes(self, count: int) -> int:
        """See `Packer`."""
        return PackedFormat(1, self.block).packed_bytes(count)

    def pack(self, values: torch.Tensor, packed: torch.Tensor, seed: int = 0) -> None:
        """See `Packer`."""
        scales, bits = parts_of(packed, 1, self.block)
        torch.mean(values.view(-1, self.block).abs(), 1, out=scales)
        if values.is_cpu:
            bits.copy_(torch.from_numpy(np.packbits(np.signbit(values.numpy()))))
        else:
            negative = torch.signbit(values).view(-1, 8).to(torch.uint8)
            bits.copy_((negative << _shifts(values.device)).sum(1))

    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """See `Packer`."""
        scales, bits = parts_of(packed, 1, self.block)
        if values.is_cpu:
            values.copy_(torch.from_numpy(np.unpackbits(bits.numpy())))
        else:
            values.view(-1, 8).copy_((bits.view(-1, 1) >> _shifts(values.device)) & 1)
        rows = values.view(-1, self.block)
        column = scales.view(-1, 1)
        torch.addcmul(column, rows, column, value=-2, out=rows)  # scale x (1 - 2 x bit)


def _in_steps(rows: torch.Tensor, scales: torch.Tensor, top: float) -> torch.Tensor:
    """Write each block's step, its largest magnitude / `top`, into `scales`; return the numbers in steps, anew.

    A block whose step underflows has the step 0, and zeros.
    """
    work = torch.abs(rows)
    steps = scales.view(-1, 1)
    torch.amax(work, 1, keepdim=True, out=steps)
    steps.div_(steps.new_full((), top))  # a number would be made a reciprocal on some devices, and round twice
    steps.masked_fill_(steps < 1e-37, 0.0)
    return torch.mul(rows, steps.reciprocal().masked_fill_(steps == 0, 0.0), out=work)


def parts_of(packed: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of a packed piece, one a block, and the bytes of its numbers."""
    scale_bytes = 4 * (packed.numel() // (block * bits // 8 + 4))
    return packed[:scale_bytes].view(torch.float32), packed[scale_bytes:]


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return uniform numbers of [0, 1) in the shape of `like`.

    A table drawn once, read from a place that is drawn anew each time: much cheaper than
    drawing every number, and still without bias. The seed comes from the codec's state.
    """
    count = like.numel()
    generator = torch.Generator().manual_seed(seed)
    table = _table(like.device)
    start = int(torch.randint(_NOISE_ELEMENTS, (), dtype=torch.int64, generator=generator))
    copies = -(-(start + count) // _NOISE_ELEMENTS)
    return table.repeat(copies)[start : start + count].view(like.shape)


_tables: dict[torch.device, torch.Tensor] = {}


def _table(device: torch.device) -> torch.Tensor:
    if device not in _tables:
        drawn = torch.rand(_NOISE_ELEMENTS, dtype=torch.float32, generator=torch.Generator().manual_seed(20211))
        _tables[device] = drawn.to(device)
    return _tables[device]

"""Kernels of Triton for blocks of whole numbers with one float32 scale each: the codecs int8 and int4.

Importing this file imports Triton; `block_launches` does, where it is used. Each kernel computes what the eager
codec does, to the bit, and reads and writes each number once:

- ``div_rn`` divides as torch does on the CPU; ``/`` is approximate;
- kernels are launched with ``enable_fp_fusion=False``, so that a product is rounded before it is added;
- 1.5 x 2^23 added to a number of at most 2^22, and taken away, rounds it to the nearest whole one, ties to even;
- magnitudes are compared by their bits, where NaN is above infinity and nothing is flushed to zero.

[Note: halves of a piece] With int8 a byte is a number. int4 has the numbers of a piece's first half in the low
nibbles and those of the second half in the high ones, so a program takes the same blocks of both halves: `halves`
is 1 or 2. A program takes `tile` blocks of `block` numbers of one row; `place` is where they are in a half, and
`exists` says which of these blocks there are. A unit may end before its last piece does: `total` is its length.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
LEAST_STEP = tl.constexpr(1e-37)
UNROLLED_RANKS = tl.constexpr(16)


@triton.jit
def _blocks(piece, halves: tl.constexpr, block: tl.constexpr, tile: tl.constexpr):
    """Return the blocks of a half, the numbers of this program's blocks, whether each exists, and their places."""
    blocks = piece // (block * halves)
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    return (
        blocks,
        number[:, None],
        number[:, None] < blocks,
        number[:, None] * block + tl.arange(0, block)[None, :],
    )


@triton.jit
def _quantise(values, top: tl.constexpr):
    """Return each block's step, the whole numbers as floats, and the values minus number x step.

    A block with NaN or infinity has that as its step, and zeros as its numbers.
    """
    magnitudes = values.to(tl.int32, bitcast=True) & MAGNITUDE
    largest = tl.max(magnitudes, 1).to(tl.float32, bitcast=True)
    step = tl.div_rn(largest, top)
    step = tl.where(step < LEAST_STEP, 0.0, step)[:, None]
    usable = (step > 0.0) & (step.to(tl.int32, bitcast=True) < INFINITY_BITS)
    inverse = tl.div_rn(1.0, tl.where(usable, step, 1.0))
    numbers = tl.where(usable, (values * inverse + ROUNDER) - ROUNDER, 0.0)
    return step, numbers, values - numbers * step


@triton.jit
def _codes_of(numbers, half: tl.constexpr, halves: tl.constexpr):
    """Return the bits of `numbers` in their part of a byte, as int32."""
    codes = numbers.to(tl.int32)
    if halves == 2:
        codes = (codes & 15) << (4 * half)
    return codes


@triton.jit
def _numbers_of(codes, half: tl.constexpr, halves: tl.constexpr):
    """Return the numbers, as floats, that are in one part of the bytes `codes`, int32 with their sign."""
    numbers = codes
    if halves == 2:
        numbers = (codes << (28 - 4 * half)) >> 28
    return numbers.to(tl.float32)


@triton.jit
def _asked(values, residual, where, held):
    """Return gradient + residual; zeros behind the end of the unit."""
    return tl.load(values + where, mask=held, other=0.0) + tl.load(residual + where, mask=held, other=0.0)


@triton.jit
def _add_row(sums, scales, codes, is_added, half: tl.constexpr, halves: tl.constexpr):
    """Return `sums` + the numbers of one packed row, in the blocks that are added."""
    step = tl.load(scales, mask=is_added, other=0.0)
    packed = tl.load(codes, mask=is_added, other=0).to(tl.int32)
    return tl.where(is_added, sums + _numbers_of(packed, half, halves) * step, sums)


@triton.jit(do_not_specialize=["own_row"])
def encode(
    values,
    residual,
    next_residual,
    scales,
    codes,
    own_row,
    piece,
    total,
    row_words,
    row_bytes,
    top: tl.constexpr,
    halves: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    """Pack the pieces of all other ranks; what rounding loses of them goes to `next_residual`."""
    row = tl.program_id(1)
    if row == own_row:
        return
    blocks, number, exists, place = _blocks(piece, halves, block, tile)
    packed = tl.zeros((tile, block), tl.int32)
    for half in tl.static_range(halves):
        where = row * piece + half * (piece // halves) + place
        held = exists & (where < total)
        asked = _asked(values, residual, where, held)
        step, numbers, rest = _quantise(asked, top)
        tl.store(next_residual + where, rest, mask=held)
        tl.store(scales + row * row_words + half * blocks + number, step, mask=exists)
        packed |= _codes_of(numbers, half, halves)
    tl.store(codes + row * row_bytes + place, packed.to(tl.int8), mask=exists)


@triton.jit(do_not_specialize=["own_row"])
def add_up(
    values,
    residual,
    next_residual,
    piece_scales,
    piece_codes,
    scales,
    codes,
    own_row,
    piece,
    total,
    row_words,
    row_bytes,
    ranks: tl.constexpr,
    top: tl.constexpr,
    halves: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    """Pack the mean of this rank's piece: its own part exactly, then the other rows in the order of ranks.

    What rounding loses of the mean is this rank's to send again, times the ranks.
    """
    blocks, number, exists, place = _blocks(piece, halves, block, tile)
    packed = tl.zeros((tile, block), tl.int32)
    for half in tl.static_range(halves):
        where = own_row * piece + half * (piece // halves) + place
        held = exists & (where < total)
        asked = _asked(values, residual, where, held)
        sums = asked
        row_scales, row_codes = piece_scales + half * blocks + number, piece_codes + place
        if ranks <= UNROLLED_RANKS:
            for row in tl.static_range(ranks):
                at_scales, at_codes = row_scales + row * row_words, row_codes + row * row_bytes
                is_added = number < tl.where(row != own_row, blocks, 0)
                sums = _add_row(sums, at_scales, at_codes, is_added, half, halves)
        else:
            for row in range(ranks):
                at_scales, at_codes = row_scales + row * row_words, row_codes + row * row_bytes
                is_added = number < tl.where(row != own_row, blocks, 0)
                sums = _add_row(sums, at_scales, at_codes, is_added, half, halves)
        step, numbers, rest = _quantise(sums * (1.0 / ranks), top)
        tl.store(next_residual + where, asked - (asked - rest * (1.0 * ranks)), mask=held)
        tl.store(scales + half * blocks + number, step, mask=exists)
        packed |= _codes_of(numbers, half, halves)
    tl.store(codes + place, packed.to(tl.int8), mask=exists)


@triton.jit
def land(
    values,
    is_finite,
    scales,
    codes,
    piece,
    total,
    row_words,
    row_bytes,
    top: tl.constexpr,
    halves: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    """Write the mean into `values`; `is_finite` becomes 0 if some of it is NaN or infinity.

    The largest number of a block is `top`, so the block's step says whether there is one.
    """
    row = tl.program_id(1)
    blocks, number, exists, place = _blocks(piece, halves, block, tile)
    packed = tl.load(codes + row * row_bytes + place, mask=exists, other=0).to(tl.int32)
    for half in tl.static_range(halves):
        where = row * piece + half * (piece // halves) + place
        step = tl.load(scales + row * row_words + half * blocks + number, mask=exists, other=0.0)
        mean = _numbers_of(packed, half, halves) * step
        tl.store(values + where, mean, mask=exists & (where < total))
        largest = (step * top).to(tl.int32, bitcast=True) & MAGNITUDE
        tl.store(is_finite + number * 0, 0, mask=exists & (largest >= INFINITY_BITS))

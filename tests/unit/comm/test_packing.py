"""Packed numbers: the layout, and that an accelerator's code path gives the bytes of the CPU's."""

from __future__ import annotations

import pytest
import torch

from farandole.comm.codecs.packing import BFloat16, Float8, Float16, Integers, Signs
from farandole.comm.codecs.quantize import Packer, piece_elements


class Elsewhere(torch.Tensor):
    """A tensor that says it is not on the CPU: its packer may not use numpy."""

    is_cpu = property(lambda self: False)


PACKERS = [BFloat16(), Float16(), Float8(), Float8(64), Integers(8), Integers(4, 64), Signs(), Signs(16)]


@pytest.mark.parametrize("packer", PACKERS, ids=repr)
def test_the_bytes_do_not_depend_on_where_they_are_packed(packer: Packer) -> None:
    count = 4096
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    length = packer.packed_bytes(count)
    here, there = torch.zeros(length, dtype=torch.uint8), torch.zeros(length, dtype=torch.uint8)
    packer.pack(values.clone(), here, 0)
    packer.pack(values.clone().as_subclass(Elsewhere), there, 0)
    assert torch.equal(here, there)
    back, also = torch.empty(count), torch.empty(count)
    packer.unpack(here, back)
    packer.unpack(there, also.as_subclass(Elsewhere))
    assert torch.equal(back, also)
    assert bool((back * values >= 0).all()), "no number changes sides"


@pytest.mark.parametrize(
    ("packer", "bits", "scales"),
    [
        (BFloat16(), 16, 0),
        (Float16(), 16, 4),
        (Integers(8), 8, 16),
        (Integers(4), 4, 16),
        (Float8(), 8, 16),
        (Signs(), 1, 8),
    ],
    ids=repr,
)
def test_bytes_of_4096_numbers(packer: Packer, bits: int, scales: int) -> None:
    assert packer.packed_bytes(4096) == 4096 * bits // 8 + 4 * scales


@pytest.mark.parametrize("packer", PACKERS, ids=repr)
def test_a_long_piece_is_packed_as_its_parts_are(packer: Packer) -> None:
    """Of so many blocks that their scales would fill several others."""
    count = 1024 * 600
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    whole = torch.empty(count)
    packed = torch.empty(packer.packed_bytes(count), dtype=torch.uint8)
    packer.pack(values.clone(), packed, 0)
    packer.unpack(packed, whole)
    for part, expected in zip(values.split(2048), whole.split(2048), strict=True):
        packed, back = torch.empty(packer.packed_bytes(2048), dtype=torch.uint8), torch.empty(2048)
        packer.pack(part.clone(), packed, 0)
        packer.unpack(packed, back)
        assert torch.equal(back, expected)


def test_signs_and_scales_are_where_they_are_said_to_be() -> None:
    values = torch.cat([torch.full((16,), -2.0), torch.full((16,), 3.0)])
    values[0] = 2.0
    packed = torch.empty(Signs(16).packed_bytes(32), dtype=torch.uint8)
    Signs(16).pack(values, packed, 0)
    assert packed[:8].view(torch.float32).tolist() == [2.0, 3.0], "scales first"
    assert packed[8:].tolist() == [0b01111111, 255, 0, 0]


@pytest.mark.parametrize(
    ("count", "block", "size", "expected"),
    [(1000, 256, 2, 512), (1024, 256, 2, 512), (1025, 256, 2, 768), (0, 256, 4, 256), (1, 1, 8, 1), (9, 1, 8, 2)],
)
def test_pieces_are_whole_blocks(count: int, block: int, size: int, expected: int) -> None:
    assert piece_elements(count, block, size) == expected


def round_trip(packer: Packer, values: torch.Tensor) -> torch.Tensor:
    packed, back = torch.empty(packer.packed_bytes(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    packer.pack(values.clone(), packed, 0)
    packer.unpack(packed, back)
    return back


def test_floats_of_8_bits_keep_what_they_can_write() -> None:
    """All numbers of the format, of both signs, where the largest of each block is 448 steps of 2^-3."""
    codes = torch.cat([torch.arange(0x7F), torch.arange(0x80, 0xFF)]).to(torch.uint8)  # without the two NaN
    numbers = codes.view(torch.float8_e4m3fn).to(torch.float32)
    values = torch.cat([numbers, torch.tensor([448.0, -448.0])]) / 8
    assert torch.equal(round_trip(Float8(256), values), values)


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e30, 3.4028234e38, 1e-33])
def test_floats_of_8_bits_never_overflow_to_nan(size: float) -> None:
    """Whatever the reciprocal of a step is rounded to: the largest of a block stays the largest."""
    values = torch.rand(64 * 4096, generator=torch.Generator().manual_seed(3)) * 2 - 1
    values[::64] = torch.rand(4096, generator=torch.Generator().manual_seed(4)) + 1
    values *= size / 2
    back = round_trip(Float8(64), values)
    assert not back.isnan().any()
    step = values.view(-1, 64).abs().amax(1, keepdim=True) / 448
    error = ((back - values).view(-1, 64) / step).abs()
    assert float(error.max()) <= 16.01, "half of the largest distance of two neighbours"
    assert bool((error <= ((values.view(-1, 64) / step).abs() * 2.0**-4).clamp(min=2.0**-10) * 1.001).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_floats_of_8_bits_show_what_is_not_finite(value: float) -> None:
    values = torch.ones(512)
    values[300] = value
    back = round_trip(Float8(256), values)
    assert torch.equal(back[:256], values[:256])
    assert back[256:].isnan().all()

"""Weights as whole numbers of 8 or 4 bits, with one scale a block: pure functions on tensors.

[Note: blocks of a weight] The elements, in the order of their indices, are cut into blocks. A block is its scale
times whole numbers, the largest of which is that of its largest element (absmax quantisation, Dettmers et al.
2022, "8-bit Optimizers via Block-wise Quantization", section 2.1). ``int8``: 64 elements, a float32 scale,
numbers to 127: 8.5 bits an element. ``int4``: 32 elements, a bfloat16 scale, numbers to 7: 4.5 bits. Shapes need
not fit: the last block is filled with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class BlockForm(NamedTuple):
    """How a codec stores a block."""

    elements: int
    """Elements of a block."""
    most: int
    """The largest whole number."""
    scale_dtype: torch.dtype
    per_byte: int
    """Elements in a byte."""


FORMS = {"int8": BlockForm(64, 127, torch.float32, 1), "int4": BlockForm(32, 7, torch.bfloat16, 2)}


def encode_blocks(weight: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed numbers and the scales of a floating-point tensor. See [Note: blocks of a weight].

    Packed is int8 ``[blocks, 64]``, or uint8 ``[blocks, 16]`` with two numbers, each plus 8, in a byte: the even
    element in the low half.
    """
    form = FORMS[codec]
    flat = weight.detach().reshape(-1).to(torch.float32)
    blocks = -(-flat.numel() // form.elements)
    if blocks * form.elements != flat.numel():
        flat = torch.nn.functional.pad(flat, (0, blocks * form.elements - flat.numel()))
    rows = flat.view(blocks, form.elements)
    scales = (rows.abs().amax(1) / form.most).to(form.scale_dtype)
    wide = scales.to(torch.float32)[:, None]
    numbers = torch.where(wide > 0, rows / wide, 0.0).round_().clamp_(-form.most, form.most)
    if form.per_byte == 1:
        return numbers.to(torch.int8), scales
    halves = (numbers + 8).to(torch.uint8)
    return halves[:, 0::2] | (halves[:, 1::2] << 4), scales


def decode_blocks(packed: torch.Tensor, scales: torch.Tensor, codec: str) -> torch.Tensor:
    """Return the elements of blocks, float32 ``[blocks, elements]``."""
    if FORMS[codec].per_byte == 1:
        return packed.to(torch.float32) * scales[:, None]
    pairs = torch.stack((packed & 15, packed >> 4), 2).to(torch.float32)
    return pairs.sub_(8.0).mul_(scales.to(torch.float32)[:, None, None]).view(packed.shape[0], -1)

"""Stochastic rounding from float32 to bfloat16: up or down with probabilities that make the mean exact.

An update smaller than half the distance of two bfloat16 numbers is lost by rounding to the nearest, each time.
Rounded stochastically it counts with its probability. (Zamirai et al. 2020, "Revisiting BFloat16 Training",
section 3.)

[Note: the same noise everywhere] The noise is a hash of step, parameter and element, not a generator's: the
numbers of a generator on a GPU depend on the GPU, and all ranks must round alike.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B9
_LOW_BITS = 0xFFFF
_HIGH_BITS = -0x10000
"""The bits of an int32 that bfloat16 keeps."""


def round_stochastically(values: torch.Tensor, seed: int, first: int = 0) -> torch.Tensor:
    """Return float32 `values` of any shape in bfloat16; the same for the same `seed` on all devices.

    Each becomes one of its two neighbours, the nearer one more likely: the expectation is the value. NaN and
    infinity stay what they are. `first`: elements of a larger tensor before these, whose noise is theirs then.
    """
    flat = values.contiguous()
    bits = flat.view(torch.int32)
    index = torch.arange(first, first + bits.numel(), dtype=torch.int32, device=bits.device)
    noise = _hash(index, seed).view(bits.shape)
    rounded = bits.add(noise.bitwise_and_(_LOW_BITS)).bitwise_and_(_HIGH_BITS).view(torch.float32)
    return torch.where(torch.isfinite(flat), rounded, flat).to(torch.bfloat16)


def seed_of(*numbers: int) -> int:
    """Return one seed of several numbers, 32 bits."""
    seed = _GOLDEN
    for number in numbers:
        seed = _mix(seed ^ (number * _GOLDEN & 0xFFFFFFFF))
    return seed


def _hash(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 32 well mixed bits for each index, in place: the finalizer of MurmurHash3 (Appleby)."""
    index.mul_(_signed(_GOLDEN)).add_(_signed(seed))
    index.bitwise_xor_(_shifted(index, 16)).mul_(_signed(0x85EBCA6B))
    index.bitwise_xor_(_shifted(index, 13)).mul_(_signed(0xC2B2AE35))
    return index.bitwise_xor_(_shifted(index, 16))


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bits moved right, zeros from the left."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _mix(number: int) -> int:
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number

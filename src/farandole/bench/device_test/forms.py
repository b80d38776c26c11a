"""The codecs that are tried on a device, and how near to the CPU each must come there.

Most of what codecs compute has one right result, which IEEE 754 fixes: there a device must have the CPU's bits.
Some operations of torch do not promise that much on every device: a division may be a product with a reciprocal,
and sums of many numbers are added in the device's own order. A codec that stands on such an operation must have
the CPU's bits where that operation alone has them on this device, and else come near: its mean has the same bits
on all ranks in any case, as all of them decode the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...core.vocabulary.codec_spec import NONE, OPTIONS, CodecSpec

_PROBED_ELEMENTS = 1 << 16
_BLOCK = 512


@dataclass(frozen=True)
class Form:
    """A codec with options."""

    text: str
    stands_on: str = ""
    """The operation that may have other bits on a device: a key of `OPERATIONS`; empty: none."""
    draws: bool = False
    """Whether it draws random numbers, which go on after a dropped step on a device, and not on the CPU."""
    is_scale_free: bool = True
    """Whether gradients times a power of two have its result times that."""

    @property
    def spec(self) -> CodecSpec:
        """The codec."""
        return CodecSpec.parse(self.text)


_DIVISION, _BLOCK_MEAN, _PRODUCTS, _NORM = (
    "division", "mean of a block", "products of matrices", "norm and fused sums",
)  # fmt: skip
FORMS = (
    Form("bf16"),
    Form("fp16"),
    Form("int8", _DIVISION),
    Form("int8:feedback=false", _DIVISION),
    Form("int8:rounding=stochastic", _DIVISION, draws=True),
    Form("int4", _DIVISION),
    Form("fp8", _DIVISION),
    Form("sign", _BLOCK_MEAN),
    Form("topk:0.3,exact=true"),  # on a device the largest are taken in any case
    Form("topk:0.02,exact=true"),
    Form("topk:0.02,exact=true,momentum=0.5,clip_norm=1.0", _NORM, is_scale_free=False),
    Form("randomk:0.05", draws=True),
    Form("powersgd:2", _PRODUCTS),
)
"""Every codec that runs on devices."""


def _divided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x / torch.full_like(x, top) for top in (127.0, 7.0)])  # as codecs divide: by a tensor


def _factors(x: torch.Tensor) -> torch.Tensor:
    product = torch.mm(x.view(-1, 256), x.view(256, -1)[:, :2])
    factor: torch.Tensor = torch.linalg.qr(product)[0]
    return factor


def _norms(x: torch.Tensor) -> torch.Tensor:
    """Return norms of several lengths: one alone may have the same bits in two orders of addition."""
    return torch.stack([x[:length].norm() for length in range(1000, len(x), 2001)])


OPERATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    _DIVISION: _divided,
    _BLOCK_MEAN: lambda x: x.view(-1, _BLOCK).abs().mean(1),
    _PRODUCTS: _factors,
    _NORM: lambda x: torch.add(x, x.flip(0), alpha=0.9) / _norms(x)[:, None],
}
"""By name: what it makes of numbers."""


def operations_with_other_bits(device: torch.device) -> frozenset[str]:
    """Return the `OPERATIONS` whose results on `device` are not the CPU's."""
    x = torch.randn(_PROBED_ELEMENTS, dtype=torch.float32, generator=torch.Generator().manual_seed(5))
    on_device = x.to(device, copy=True)
    return frozenset(
        name for name, compute in OPERATIONS.items() if not torch.equal(compute(x), compute(on_device).cpu())
    )


def names() -> frozenset[str]:
    """Return the names of all codecs but none."""
    return frozenset(OPTIONS) - {NONE}

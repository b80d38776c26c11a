"""Whether tensors fit a segmented collective, asked before anything is sent, answered with values."""

from __future__ import annotations

from functools import cache

import torch

from ...comm.messages.reduce_rules import accumulates_in_fp32


def check_sum(tensor: torch.Tensor) -> None:
    """Raise `ValueError` for a tensor that cannot be added up over ranks."""
    _check_place(tensor)
    if not _adds_up(tensor.dtype):
        raise ValueError(f"the sum of {tensor.dtype}: torch cannot add this type up")


def _check_place(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"a {tensor.layout} tensor on {tensor.device}: segments are sent from dense tensors in CPU memory"
        )


def check_pair(
    operation: str, *, whole: torch.Tensor, part: torch.Tensor, names: tuple[str, str], size: int
) -> None:
    """Raise `ValueError` unless `whole` is `size` times `part`, of the same type and without gaps."""
    large, small = names
    _check_place(whole)
    _check_place(part)
    if whole.dtype != part.dtype:
        raise ValueError(f"{operation}: {large} is {whole.dtype}, {small} {part.dtype}")
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"{operation} over {size} ranks: {large} of shape {tuple(whole.shape)} has {whole.numel()} elements, "
            f"expected {size} x {part.numel()} for {small} of shape {tuple(part.shape)}"
        )
    for name, tensor in zip(names, (whole, part), strict=True):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{operation}: {name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, "
                f"expected a contiguous tensor"
            )


@cache
def _adds_up(dtype: torch.dtype) -> bool:
    """Return whether torch adds up tensors of this type."""
    try:
        one = torch.zeros(1, dtype=torch.float32).to(dtype)
        if accumulates_in_fp32(dtype):
            one.copy_(one.float())
        else:
            torch.add(one, one, out=one)
    except (RuntimeError, NotImplementedError):
        return False
    return True

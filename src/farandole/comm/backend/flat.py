"""User tensors as exchanges want them, flat and contiguous, and how calls describe them to other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from .exchanges.exchange import TEXT_BYTES


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements, (elements,): a view where that is possible.

    Raises:
        NotImplementedError: for a tensor that is sparse, quantised, or not in CPU memory.
    """
    if not tensor.is_cpu:
        raise NotImplementedError(f"farandole: a tensor on {tensor.device}: this backend has CPU tensors only")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "a quantised tensor" if tensor.is_quantized else f"a tensor of layout {tensor.layout}"
        raise NotImplementedError(f"farandole: {kind}: this backend has dense tensors only")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def land(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write `flat` into the tensor that it was made of, where it is no view of it."""
    if flat.numel() and (flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg()):
        tensor.detach().copy_(flat.view(tensor.shape))


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """Return how many elements of which type: "1000 float32"."""
    parts = [f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors]
    return ", ".join(parts) if parts else "nothing"


def shortened(call: str) -> str:
    """Return a text that fits, and is equal only for equal texts."""
    if len(call) < TEXT_BYTES:
        return call
    digest = hashlib.sha256(call.encode()).hexdigest()[:16]
    return f"{call[: TEXT_BYTES - 40]}... ({digest})"


def only(tensors: Sequence[Any], name: str) -> Any:
    """Return the single entry of a list that c10d wraps it in."""
    if len(tensors) != 1:
        raise ValueError(f"farandole: {name} of {len(tensors)} tensors, expected one")
    return tensors[0]


def land_all(flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Write each of `flats` into its tensor, as `land` does."""
    for flat, tensor in zip(flats, tensors, strict=True):
        land(flat, tensor)


def split(flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int] | None, ranks: int) -> list[torch.Tensor]:
    """Return one piece of `flat` for each rank; `sizes`: in rows of `tensor`, None or empty: equal ones."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(f"farandole: all_to_all of {rows} rows, which {ranks} ranks cannot divide equally")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ValueError(
            f"farandole: all_to_all: split sizes {list(sizes)} for {rows} rows and {ranks} ranks: expected "
            f"{ranks} numbers whose sum is {rows}"
        )
    width = flat.numel() // rows if rows else 0
    return list(flat.split([size * width for size in sizes]))

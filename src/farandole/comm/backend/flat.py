"""User tensors as exchanges want them, flat and contiguous, and how calls describe them to other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..messages.element_bytes import side_by_side
from .exchanges.exchange import TEXT_BYTES

_OVERLAPS = 1
"""What torch says of a tensor with elements that certainly share memory."""


def flattened(tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
    """Return (elements,): a view of the tensor where that is possible, else room for its elements.

    Calls of a group are carried out in their order, which may be long after they were made: what is read is what
    the tensor holds then. So `take` fills the room when the call is carried out, and `land` empties it.

    Args:
        tensor: the user's.
        written: whether the call writes to it.

    Raises:
        NotImplementedError: for a tensor that is sparse, quantised, or not in CPU memory.
        ValueError: for one that is to be written to and whose elements share memory, as those of `expand` do.
    """
    if not tensor.is_cpu:
        raise NotImplementedError(f"farandole: a tensor on {tensor.device}: this backend has CPU tensors only")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = f"a tensor of layout {tensor.layout}"
        kind = "a quantised tensor" if tensor.is_quantized else "a nested tensor" if tensor.is_nested else kind
        raise NotImplementedError(f"farandole: {kind}: this backend has dense tensors only")
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return side_by_side(plain)
    if written and torch._debug_has_internal_overlap(plain) == _OVERLAPS:
        raise ValueError(
            f"farandole: a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}, whose elements "
            "share memory, cannot be written to: give its clone()"
        )
    return plain.new_empty(plain.numel())


def take(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill the room that `flattened` made for the tensor; nothing where it is a view."""
    if _is_room(flat, tensor):
        flat.view(tensor.shape).copy_(tensor.detach())


def land(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the room that `flattened` made for the tensor into it; nothing where it is a view."""
    if _is_room(flat, tensor):
        tensor.detach().copy_(flat.view(tensor.shape))


def take_all(flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """`take` each."""
    for flat, tensor in zip(flats, tensors, strict=True):
        take(flat, tensor)


def land_all(flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """`land` each."""
    for flat, tensor in zip(flats, tensors, strict=True):
        land(flat, tensor)


def _is_room(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool(flat.numel()) and flat.data_ptr() != tensor.data_ptr()


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

"""Values of state dicts as JSON, with tensors and arrays set aside by name."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...checkpoint.dtypes import ITEM_BYTES
from ...checkpoint.encoding import Restore
from ...core.vocabulary.errors import CheckpointError

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class TensorsAside:
    """The `keep` of `encoding.encode`: keeps the tensors of a state by name.

    Args:
        prefix: before each name.
        ties: whether two names of the same memory are one tensor, as with tied parameters.
    """

    def __init__(self, prefix: str = "", *, ties: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix, self._ties = prefix, ties
        self._names: dict[tuple[Any, ...], str] = {}

    def __call__(self, path: str, value: Any) -> Any:
        """Return the JSON of a value that is not plain; None if it has none."""
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(path, value)}
        if isinstance(value, np.ndarray) and value.dtype.hasobject is False and value.dtype.name in ITEM_BYTES:
            return {"$numpy": self._keep(path, torch.from_numpy(np.array(value)))}
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"$numpy_scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if type(value) is torch.Size:
            return {"$size": list(value)}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        return None

    def _keep(self, path: str, tensor: torch.Tensor) -> str:
        tensor = tensor.detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        if self._prefix and local is not tensor:
            raise CheckpointError(
                f"the tensor at {path} is a DTensor, which is saved as part of modules and optimizers only",
                is_input=True,
            )
        if type(local) not in _PLAIN or local.layout != torch.strided or dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"the tensor at {path} is a {type(local).__name__} of type {dtype} and layout {local.layout}, "
                "which has no form in a checkpoint",
                is_input=True,
            )
        same = (local.data_ptr(), str(local.device), tensor.shape, local.stride(), dtype)
        if self._ties and local.numel() and same in self._names:
            return self._names[same]
        name = self._names[same] = self._prefix + path
        self.tensors[name] = tensor
        return name


def restorer(tensors: Mapping[str, torch.Tensor]) -> Restore:
    """Return the `restore` of `encoding.decode`, with the tensors that were set aside."""

    def restore(key: str, body: Any) -> Any:
        known: dict[str, Callable[[Any], Any]] = {
            "$tensor": tensors.__getitem__,
            "$numpy": lambda name: tensors[name].numpy(),
            "$numpy_scalar": lambda pair: np.frombuffer(base64.b64decode(pair[1]), np.dtype(pair[0]))[0],
            "$size": torch.Size,
            "$dtype": _dtype,
            "$device": torch.device,
        }
        if key not in known:
            raise CheckpointError(f"a value of a checkpoint of the unknown kind {key}", is_input=True)
        try:
            return known[key](body)
        except KeyError as problem:
            raise CheckpointError(f"the checkpoint has no tensor {problem}", is_input=True) from None

    return restore


def tensor_names(value: Any) -> list[str]:
    """Return the names of all tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [name for each in value for name in tensor_names(each)]
    if isinstance(value, dict):
        own = [value[key] for key in ("$tensor", "$numpy") if isinstance(value.get(key), str)]
        return own + [name for each in value.values() for name in tensor_names(each)]
    return []


def _dtype(name: Any) -> torch.dtype:
    if name not in ITEM_BYTES:
        raise CheckpointError(f"a checkpoint with the unknown type {name!r}", is_input=True)
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), f"{name} is no type"
    return found

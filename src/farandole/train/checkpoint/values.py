"""Values of state dicts as JSON, with tensors and arrays set aside by name."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...checkpoint.manifest import Restore
from ...checkpoint.shard_file import ITEM_BYTES
from ...core.vocabulary.errors import CheckpointError
from ...parallel.data.whole_state import WholeStateGuard
from ...parallel.frozen_weight import FrozenWeight

ELSEWHERE = {"$elsewhere": True}
"""Stands for what another rank saves."""
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
        if isinstance(value, FrozenWeight):
            parts = {key: {"$tensor": self._keep(f"{path}/{key}", part)} for key, part in value.parts.items()}
            dtype = str(value.dtype).removeprefix("torch.")
            return {"$frozen": {"codec": value.codec, "dtype": dtype, "shape": list(value.shape), **parts}}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(path, value)}
        if isinstance(value, np.ndarray) and value.dtype.hasobject is False and value.dtype.name in ITEM_BYTES:
            native = np.array(value, value.dtype.newbyteorder("="))  # files have one order of bytes
            return {"$numpy": self._keep(path, torch.from_numpy(native))}
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
        # A shard without elements is known by its memory too: on the other ranks it has some.
        memory = local.untyped_storage()
        place = (memory.data_ptr(), local.storage_offset(), str(local.device))
        same = (*place, tensor.shape, local.stride(), dtype)
        if self._ties and memory.nbytes() and same in self._names:
            return self._names[same]
        name = self._names[same] = self._free(self._prefix + path)
        self.tensors[name] = tensor
        return name

    def _free(self, name: str) -> str:
        """Return `name`, or one that is not taken: keys such as 1 and "1" have one path."""
        found, count = name, 1
        while found in self.tensors:
            count += 1
            found = f"{name}~{count}"
        return found


class CopiedIfShared(Mapping[str, torch.Tensor]):
    """Tensors by name, as copies where their memory is not this rank's alone: to be kept.

    Args:
        tensors: as they were read.
        shared: the names of those to copy.
        change: what becomes of each.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        shared: frozenset[str],
        change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
    ) -> None:
        self._tensors, self._shared, self._change = tensors, shared, change

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor; raise `KeyError` if there is none of that name."""
        tensor = self._tensors[name]
        return self._change(name, tensor.clone() if name in self._shared else tensor)

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._tensors)


def only_copies(module: nn.Module) -> bool:
    """Return whether `module.load_state_dict` copies tensors into those it has, and keeps none of what it gets."""
    own = (nn.Module.load_state_dict, nn.Module._load_from_state_dict)
    for part in module.modules():
        kind = type(part)
        changed = (kind.load_state_dict, kind._load_from_state_dict) != own
        hooks = [getattr(each, "hook", each) for each in part._load_state_dict_pre_hooks.values()]
        keeps = any(not isinstance(each, WholeStateGuard) for each in hooks)
        if (changed and not kind.__module__.startswith("torch.nn.modules.")) or keeps:
            return False
    return not torch.__future__.get_swap_module_params_on_conversion()


def restorer(tensors: Mapping[str, torch.Tensor]) -> Restore:
    """Return the `restore` of `encoding.decode`, with the tensors that were set aside."""

    def restore(key: str, body: Any) -> Any:
        known: dict[str, Callable[[Any], Any]] = {
            "$tensor": tensors.__getitem__,
            "$numpy": lambda name: tensors[name].numpy(),
            "$numpy_scalar": lambda pair: np.frombuffer(base64.b64decode(pair[1]), np.dtype(pair[0]))[0],
            "$frozen": lambda body: frozen_weight(body, tensors).decode(),
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


def frozen_weight(body: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> FrozenWeight:
    """Return the frozen weight that is encoded as `body`, made of the tensors that were set aside."""
    packed, scales = (tensors[body[key]["$tensor"]] for key in ("packed", "scales"))
    return FrozenWeight(packed, scales, body["codec"], (body["shape"], _dtype(body["dtype"])))


def tensor_names(value: Any) -> list[str]:
    """Return the names of all tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [name for each in value for name in tensor_names(each)]
    if isinstance(value, dict):
        own = [value[key] for key in ("$tensor", "$numpy") if isinstance(value.get(key), str)]
        return own + [name for each in value.values() for name in tensor_names(each)]
    return []


def entries(encoded: Any) -> list[tuple[str, Any]]:
    """Return names and values of an encoded dict."""
    if isinstance(encoded, dict) and "$dict" in encoded:
        return [(name, value) for name, value in encoded["$dict"] if isinstance(name, str)]
    return list(encoded.items())


def _dtype(name: Any) -> torch.dtype:
    if name not in ITEM_BYTES:
        raise CheckpointError(f"a checkpoint with the unknown type {name!r}", is_input=True)
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), f"{name} is no type"
    return found

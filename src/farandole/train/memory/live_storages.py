"""How much memory of tensors is alive, now and at most: each storage is counted from its creation to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_DEVICE_OF = torch.ops.prim.device.default


class LiveStorages(TorchDispatchMode):
    """Counts storages that operations return while the mode is on; views and results in place count once.

    Storages are identified by Python objects that live as long as their memory. Works on fake tensors too, whose
    storages have a size and no memory. What a kernel allocates and frees inside is not seen.
    """

    def __init__(self, ignored: Iterable[torch.Tensor], copied: Iterable[torch.Tensor] = ()) -> None:
        """Never count the storages of `ignored`; count conversions of `copied` also in `copy_bytes`."""
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.copy_bytes = 0
        """Bytes of `live_bytes` that are tensors of `copied` in another type."""
        self.history: list[tuple[int, int]] = []
        """`live_bytes` and `copy_bytes` after each storage that was made."""
        self._ignored = {storage._cdata for tensor in ignored for storage in storages_of(tensor)}
        self._copied = {storage._cdata for tensor in copied for storage in storages_of(tensor)}
        self._live: dict[int, _Counted] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count what it returns."""
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):  # autograd asks twice an operation
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and any(
            storage._cdata in self._copied for storage in storages_of(args[0])
        )
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor, is_copy=is_copy)
        return result

    def count(self, tensor: torch.Tensor, *, is_copy: bool = False) -> None:
        """Count the storage of `tensor` until its end."""
        for storage in storages_of(tensor):
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._ignored or key in self._live:
                continue
            copy_bytes = nbytes * is_copy
            self.live_bytes += nbytes
            self.copy_bytes += copy_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.history.append((self.live_bytes, self.copy_bytes))
            self._live[key] = _Counted(weakref.ref(storage, partial(self._end, key)), nbytes, copy_bytes)

    def stop_counting(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` no longer, although it is alive."""
        for storage in storages_of(tensor):
            if storage._cdata in self._live:
                self._end(storage._cdata)

    def _end(self, key: int, _: Any = None) -> None:
        counted = self._live.pop(key)
        self.live_bytes -= counted.nbytes
        self.copy_bytes -= counted.copy_bytes


class _Counted(NamedTuple):
    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    copy_bytes: int


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a dense tensor or one in coordinates; of others none."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []

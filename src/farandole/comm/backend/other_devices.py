"""Groups of several devices, such as "cpu:farandole,cuda:nccl": tensors of other devices go to a group of torch.

[Note: one group, several devices] A process group in Python is the only one that torch makes: there is no backend
for the other devices then. So ours makes them: one group of torch for each device of `get_backend_config`, with
that device's backend. It is made at its first tensor, on all ranks alike, because torch says what was asked for
only after the group is made. Which tensor goes where is decided for each call by the first tensor of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..device.streams import untraced
from .calls import GroupWork
from .process_group import ProcessGroup

_OPERATIONS = (
    "broadcast", "reduce", "gather", "scatter", "allreduce", "allreduce_coalesced", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "allgather", "allgather_coalesced",
    "all_gather_single", "all_gather_single_coalesced", "alltoall", "all_to_all_single", "send", "recv",
    "recv_anysource", "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall_base",
)  # fmt: skip
"""Operations of tensors: the rest of a group's methods have none."""


class DeviceGroup(ProcessGroup):
    """A `ProcessGroup` that gives tensors of other devices to their backends."""

    def __init__(self, *arguments: Any, store: dist.Store, **named: Any) -> None:
        """`store`: of the group alone. The rest is that of `GroupBase`."""
        super().__init__(*arguments, **named)
        self._store = store
        self._inner: dict[str, Any] = {}

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backend_names() or ["cpu"]]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind == "cpu" or not self._backend_names():
            return self  # torch asks before the group is registered, and whether connections can be made early
        return self._group_of(kind)._get_backend(torch.device(kind))

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type == "cpu":
            raise NotImplementedError(
                "farandole: calls with CPU tensors are not coalesced by device: leave `device` out of the "
                "coalescing manager, or make them one after the other"
            )
        self._group_of(torch.device(device).type)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._group_of(torch.device(device).type)._end_coalescing(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each wait last `timeout` at most, on all devices."""
        super().set_timeout(timeout)
        for group in self._inner.values():
            group.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group on all devices."""
        super().shutdown()
        for group in self._inner.values():
            group.shutdown()

    def abort(self) -> None:
        """Leave the group on all devices at once."""
        super().abort()
        for group in self._inner.values():
            group.abort()

    def _backend_names(self) -> dict[str, str]:
        """Return the backend of each device, as the group was asked for; nothing before torch knows the group."""
        config = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        return dict(pair.split(":") for pair in config.split(",") if pair)

    def _has_no_data(self, tensor: torch.Tensor) -> bool:
        """Return whether it is a fake tensor, or a meta one that no backend is for: shapes are all there is."""
        if tensor.is_meta:
            return "meta" not in self._backend_names()
        fakes = sys.modules.get("torch._subclasses.fake_tensor")
        return fakes is not None and isinstance(tensor, fakes.FakeTensor)

    def _group_of(self, kind: str) -> Any:
        """Return torch's group for a kind of device; see [Note: one group, several devices]."""
        if kind not in self._inner:
            name = self._backend_names().get(kind)
            if name is None:
                raise NotImplementedError(
                    f"farandole: a tensor on {kind}: this backend has CPU tensors only, and the group no other "
                    f'(make it with "cpu:farandole,{kind}:..." and a backend of torch)'
                )
            self._inner[kind] = self._make(kind, name)
        return self._inner[kind]

    def _make(self, kind: str, name: str) -> Any:
        store = dist.PrefixStore(f"{kind}/", self._store)
        rank, size, wait = self.rank(), self.size(), timedelta(seconds=self._timeout_seconds)
        group: Any = dist.ProcessGroup(store, rank, size)
        if name == "gloo":
            number = dist.ProcessGroup.BackendType.GLOO
            backend: Any = dist.ProcessGroupGloo(store, rank, size, timeout=wait)
        elif name == "nccl":
            number = dist.ProcessGroup.BackendType.NCCL
            backend = self._make_nccl(store, wait)
        elif name.upper() in dist.Backend._plugins:
            number = dist.ProcessGroup.BackendType.CUSTOM
            backend = self._make_plugin(name, store, wait)
        else:
            raise NotImplementedError(
                f"farandole: {kind}:{name} beside cpu:farandole: other devices may have gloo, nccl, or a backend "
                f"that was registered, of {', '.join(sorted(dist.Backend._plugins))}"
            )
        group._register_backend(torch.device(kind), number, backend)
        group._set_default_backend(number)
        group._set_group_name(f"{self.getGroupName()}/{kind}")
        group._set_group_desc(self.getGroupDesc())
        return group

    def _make_nccl(self, store: dist.Store, wait: timedelta) -> Any:
        if not dist.is_nccl_available():
            raise NotImplementedError("farandole: cuda:nccl beside cpu:farandole: this torch has no NCCL")
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        options.global_ranks_in_group = list(self._names)
        options.group_name = self.getGroupName()
        return dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)

    def _make_plugin(self, name: str, store: dist.Store, wait: timedelta) -> Any:
        plugin = dist.Backend._plugins[name.upper()]
        if not plugin.extended_api:
            return plugin.creator_fn(store, self.rank(), self.size(), wait)
        options: Any = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.timeout = store, wait
        options.group_rank, options.group_size = self.rank(), self.size()
        options.group_id, options.global_ranks_in_group = self.getGroupName(), list(self._names)
        return plugin.creator_fn(options, None)


def _at_the_door(name: str) -> Callable[..., Any]:
    """Return the operation as torch calls it: on any device, for tensors without data, under torch.compile."""
    ours = getattr(ProcessGroup, name)

    @untraced
    def operation(self: DeviceGroup, *arguments: Any, **named: Any) -> Any:
        tensors = _tensors((*arguments, *named.values()))
        if tensors and self._has_no_data(tensors[0]):
            work = GroupWork(name, self.global_ranks[self.rank()], _tensors(arguments[:1]))
            work.end.tell()
            return work
        if not tensors or tensors[0].is_cpu:
            return ours(self, *arguments, **named)
        return getattr(self._group_of(tensors[0].device.type), name)(*arguments, **named)

    operation.__name__, operation.__doc__ = name, ours.__doc__
    return operation


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)  # ranks that are no root of a gather give an empty list first
    return found


for _name in (*_OPERATIONS, "barrier", "monitored_barrier"):
    setattr(DeviceGroup, _name, _at_the_door(_name))

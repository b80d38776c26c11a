"""The state of an optimizer of which each rank keeps its rows: in `state_dict`, and back from one.

``optimizer.state`` holds this rank's rows. In ``optimizer.state_dict()`` they are DTensors of the parameters'
shapes, so `fd.save` writes every row once, and any number of ranks can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ...comm.gradients.row_blocks import rows_of
from ...core.vocabulary.errors import ConfigError


class StateShard(DTensor):
    """This rank's rows of a state, as a DTensor that is not pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        """Return a copy with its own rows."""
        rows = self.to_local().clone()
        return shard_of(rows, self.device_mesh, tuple(self.shape), self.stride())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise `ConfigError`: a file of `torch.save` would hold the rows of one rank alone."""
        raise ConfigError(
            "the optimizer's state is sharded (plan key zero), and pickle would keep this rank's rows alone",
            remedy="use fd.save, or call value.full_tensor() on all ranks for each value",
        )


def shard_of(rows: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], stride: tuple[int, ...]) -> StateShard:
    """Return this rank's `rows` of a tensor of `shape`, divided over `mesh` along the first dimension."""
    made = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
    made.__class__ = StateShard
    assert isinstance(made, StateShard), "its class was changed"
    return made


Places = Callable[[torch.Tensor], tuple[int, int] | None]
"""Gives the first of this rank's rows of a parameter, and the one behind its last; None for one that is whole."""


class StateShards:
    """The three hooks of one optimizer."""

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh, places: Places) -> None:
        self._mesh, self._places = mesh, places
        optimizer.register_state_dict_post_hook(self.wrap)
        optimizer.register_load_state_dict_pre_hook(self.unwrap)
        optimizer.register_load_state_dict_post_hook(self.keep_types)
        self._loaded: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        """This rank's rows of the states that `load_state_dict` loads, with their parameters, by index."""

    def wrap(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict whose rows are DTensors; called by `state_dict`."""
        state = {}
        for index, (parameter, values) in self._by_index(optimizer, saved["state"]).items():
            place = self._places(parameter)
            lengths = None if place is None else (place[1] - place[0], *parameter.shape[1:])
            state[index] = {
                key: shard_of(value, self._mesh, tuple(parameter.shape), parameter.stride())
                if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == lengths
                else value
                for key, value in values.items()
            }
        return {**saved, "state": {**saved["state"], **state}}

    def unwrap(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with this rank's rows of every state; called by `load_state_dict` on all ranks."""
        self._loaded = {
            index: (parameter, {key: self._rows(value, parameter) for key, value in values.items()})
            for index, (parameter, values) in self._by_index(optimizer, saved["state"]).items()
        }
        state = {index: values for index, (_, values) in self._loaded.items()}
        return {**saved, "state": {**saved["state"], **state}}

    def keep_types(self, optimizer: Optimizer) -> None:
        """Undo what torch does after `unwrap`: it casts states to the parameter's type, of fewer bits perhaps."""
        for parameter, values in self._loaded.values():
            own = optimizer.state.get(parameter, {})
            for key, value in values.items():
                now = own.get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    own[key] = value.to(now.device)
        self._loaded = {}

    def _by_index(
        self, optimizer: Optimizer, state: Mapping[Any, Any]
    ) -> dict[int, tuple[torch.Tensor, Mapping[str, Any]]]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            index: (parameters[index], values)
            for index, values in state.items()
            if isinstance(index, int) and index < len(parameters) and isinstance(values, Mapping)
        }

    def _rows(self, value: Any, parameter: torch.Tensor) -> Any:
        place = self._places(parameter)
        if place is None or not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(parameter.shape):
            return value
        if isinstance(value, DTensor):
            if value.device_mesh == self._mesh and tuple(value.placements) == (Shard(0),):
                return value.to_local()
            value = value.full_tensor()
        return value[place[0] : place[1]].clone()


def own_rows(parameter: torch.Tensor, mesh: DeviceMesh) -> tuple[int, int] | None:
    """Return the rows of `parameter` that are this rank's; None for a parameter without dimensions."""
    return rows_of(parameter.shape[0], mesh.size(), mesh.get_local_rank()) if parameter.dim() else None

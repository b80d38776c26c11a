"""Buffers that change while training, kept equal on all ranks.

[Note: what becomes of running statistics] With plain BatchNorm every rank sees its own batches, so
running means and variances drift apart. They travel with each exchange of gradients and become the
mean over the ranks, weighted by samples: statistics of all the data, not of rank 0's share of it. A
layer in evaluation mode, and any other floating-point buffer, keeps rank 0's very bits. Buffers that
do not change in the first step (masks, tables of angles) are left alone and cost nothing, and integer
buffers (`num_batches_tracked`) advance alike by themselves.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from .batch_norm import is_synchronised


class BufferSync:
    """Carries a model's changing buffers with the gradients. `ExtraTensors` of `comm.reducer`."""

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        # Who keeps a model's reducer keeps this: it must not keep the model in turn.
        self._seen_model = weakref.ref(model)
        self._parts = {name: part for name, part in model.named_children() if part is not model}
        self._own = dict(model.named_buffers(recurse=False))
        self._versions = {name: buffer._version for name, buffer in model.named_buffers()}
        self._names: list[str] = []
        self._statistics: set[str] = set()
        self._flat = torch.empty(0)

    def prepare(self) -> bool:
        """Agree with all ranks on which buffers travel: those that changed since `distribute`, on any rank."""
        self._statistics = _statistics(self._model)
        changed = [
            name
            for name, buffer in self._model.named_buffers()
            if buffer.is_floating_point()
            and (name in self._statistics or buffer._version != self._versions.get(name))
        ]
        union = {name for names in all_gather_json(self._world, "agreeing on buffers", changed) for name in names}
        self._names = [name for name, _ in self._model.named_buffers() if name in union]
        return bool(self._names)

    @torch.no_grad()
    def pack(self, weight: float) -> torch.Tensor:
        """Return the flat tensor to sum over the ranks."""
        buffers = [self._model.get_buffer(name) for name in self._names]
        wide = torch.float64 if any(buffer.dtype == torch.float64 for buffer in buffers) else torch.float32
        leader = 1.0 if self._world.rank == 0 else 0.0
        pieces = []
        for name, buffer in zip(self._names, buffers, strict=True):
            averaged = name in self._statistics and self._model.get_submodule(name.rpartition(".")[0]).training
            share = weight if averaged else leader
            piece = buffer.reshape(-1).to(wide)
            # Not a product with 0: a placeholder's statistics may be NaN.
            pieces.append(piece * share if share else torch.zeros_like(piece))
        self._flat = torch.cat(pieces)
        return self._flat

    @torch.no_grad()
    def unpack(self) -> None:
        """Write the sums back."""
        offset = 0
        for name in self._names:
            buffer = self._model.get_buffer(name)
            buffer.copy_(self._flat[offset : offset + buffer.numel()].view(buffer.shape))
            offset += buffer.numel()

    @property
    def _model(self) -> nn.Module:
        """The model; one of its parts where it is gone and they live: a list of modules was distributed."""
        model = self._seen_model()
        if model is None:
            model = nn.Module()
            for name, part in self._parts.items():
                model.add_module(name, part)
            for name, buffer in self._own.items():
                model.register_buffer(name, buffer)
        return model


def _statistics(model: nn.Module) -> set[str]:
    """Return the names of the running statistics of layers that do not synchronise themselves."""
    found = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not is_synchronised(module):
            for name in ("running_mean", "running_var"):
                if getattr(module, name) is not None:
                    found.add(f"{prefix}.{name}" if prefix else name)
    return found

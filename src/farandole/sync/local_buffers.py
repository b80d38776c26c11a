"""Running statistics and other buffers that change, where ranks train on their own: averaged at meetings."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn

from ..comm.reducer.options import ExtraTensors
from ..comm.world.comm_errors import translated
from ..comm.world.world import World


class LocalBuffers:
    """The buffers of one model. To be made by all ranks."""

    def __init__(self, model: nn.Module, extra: ExtraTensors | None, here: World) -> None:
        """`extra`: which buffers travel, and how; None: none do."""
        self._model, self._extra, self._here = weakref.ref(model), extra, here
        self._travels: bool | None = None
        """Whether some do; None: it is not agreed on yet."""
        self._averaged: dict[str, torch.Tensor] = {}

    def meet(self, weight: float) -> None:
        """Average them; to be called by all ranks. `weight`: this rank's share of the samples."""
        if self._extra is None or self._here.size == 1:
            return
        if self._travels is None:
            self._travels = self._extra.prepare()
        if not self._travels:
            return
        flat = self._extra.pack(weight / self._here.size)
        with translated(self._here, "mean of buffers"):
            dist.all_reduce(flat, group=self._here.group)
        self._extra.unpack()
        model = self._model()
        if model is not None:
            self._averaged = {
                name: each.detach().clone() for name, each in model.named_buffers() if each.is_floating_point()
            }

    def averaged(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the model's buffers, each with what it was after the last meeting."""
        model = self._model()
        buffers = {} if model is None else dict(model.named_buffers())
        return [(buffers[name], value) for name, value in self._averaged.items() if name in buffers]

"""`SyncBatchNorm`: batch normalisation with the statistics of all ranks, on CPU and GPU.

    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)

The arithmetic is that of `parallel.data.batch_norm`: exact gradients, short batches weighted by their samples. The
statistics travel in a group of their own, which is made in the first training pass, on all ranks. All ranks must
make the same passes: a rank that has joined does not, so ``join()`` and this layer do not go together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...comm.world.world import world
from ...parallel.data.batch_norm import StatsGroup, Synchronised
from ..common.exceptions import from_comm_error
from .mpi_ops import (  # noqa: F401 - scripts import names of Horovod from here
    Sum,
    allgather_async,
    allreduce_async,
    rank,
    size,
    synchronize,
)


class SyncBatchNorm(Synchronised):
    """BatchNorm over the global batch. Input: (N, C, ...), at least two dimensions; output: the same shape.

    In evaluation, and in a world of one, it is ``torch.nn.BatchNorm``. A forward pass raises `ValueError` for an
    input of fewer dimensions, and `HorovodInternalError` if a rank is lost.

    Args:
        num_features: C, the number of channels.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None: their cumulative mean.
        affine: whether there are a learnable weight and bias.
        track_running_stats: whether to keep running statistics for evaluation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @property
    def _farandole(self) -> StatsGroup:  # type: ignore[override] # looked up, so that layers can be copied and saved
        here = world()
        return here.session.keep(StatsGroup, lambda: StatsGroup(here, from_comm_error))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name for it
        """Normalise; see the class."""
        if world().size == 1:
            self._check_input_dim(input)
            alone: torch.Tensor = _BatchNorm.forward(self, input)
            return alone
        return super().forward(input)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name for it
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Return `module` with every BatchNorm layer in it replaced by a `SyncBatchNorm`.

        Parameters and buffers are the same objects, so optimizers may be made before or after. `process_group`
        is there for torch's signature; all ranks take part.
        """
        del process_group
        if isinstance(module, _BatchNorm):
            return module if isinstance(module, cls) else cls._made_from(module)
        for name, child in module.named_children():
            converted = cls.convert_sync_batchnorm(child)
            if converted is not child:
                module.add_module(name, converted)
        return module

    @classmethod
    def _made_from(cls, layer: _BatchNorm) -> SyncBatchNorm:
        made = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        made._parameters.update(layer._parameters)
        made._buffers.update(layer._buffers)
        made.training = layer.training
        return made

"""FSDP2 over our collectives: its all-gathers and reduce-scatters in segments.

    model = fully_shard(model)
    use_segments(model)

For models whose parameters are in CPU memory, on gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.vocabulary.errors import ConfigError
from .segmented import all_gather, reduce_scatter


def use_segments(model: nn.Module) -> int:
    """Make every FSDP2 module in `model` use our collectives; return how many there are.

    Raises `ConfigError` when there is none, or when this torch cannot be given collectives.
    """
    modules = [module for module in model.modules() if isinstance(module, _fsdp_module())]
    if not modules:
        raise ConfigError("no module of this model is sharded", remedy="call fully_shard(model) first")
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        if not hasattr(modules[0], name):
            raise ConfigError(
                f"torch {torch.__version__} has no FSDPModule.{name}, so FSDP2 cannot be given other collectives",
                remedy="use a newer torch (2.13 has it)",
            )
    for module in modules:
        module.set_custom_all_gather(SegmentsAllGather())
        module.set_custom_reduce_scatter(SegmentsReduceScatter())
    return len(modules)


def _fsdp_module() -> Any:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        raise ConfigError(
            f"torch {torch.__version__} has no FSDP2", remedy="use a newer torch (2.13 has it)"
        ) from None
    return FSDPModule


class _Allocate:
    """Where FSDP2 puts what travels: ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty tensor."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


class SegmentsAllGather(_Allocate):
    """FSDP2's protocol ``AllGather``. Has gathered when it returns, so there is no work to wait for."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather; see `collectives.all_gather`."""
        all_gather(output_tensor, input_tensor, group)


class SegmentsReduceScatter(_Allocate):
    """FSDP2's protocol ``ReduceScatter``, for sums and averages."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce and scatter; see `collectives.reduce_scatter`. Other operations raise `ValueError`."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"reduce_scatter: operation {op}, expected a sum or an average")
        reduce_scatter(output_tensor, input_tensor, group, average=op == dist.ReduceOp.AVG)

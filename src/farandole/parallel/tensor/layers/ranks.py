"""The ranks of one tensor group, and their collectives: errors translated, any layout, calls counted."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ....comm.world.comm_errors import translated
from ....comm.world.world import World
from ....core.step_model.comm_cost import ring_sent_bytes
from ...instrument.inner_exchange import inner_exchange
from ...mesh import Mesh

DEGREE = "tensor"


@dataclass(frozen=True, eq=False)
class TensorRanks:
    """The ranks that share the layers of one copy of the model, seen from one of them."""

    part: World
    group: dist.ProcessGroup
    rank: int
    size: int
    calls: Counter[str] = field(default_factory=Counter)
    """Collectives so far, by kind."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of their tensors, as one rank has them whole, by kind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        return self  # a copy of a layer is split over the same ranks

    def all_reduce(self, tensor: torch.Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks, in its memory if it is contiguous."""
        tensor = tensor.contiguous()
        self._count("all_reduce", tensor)
        with translated(self.part, f"all-reduce of {what}"), self._inner(tensor.nbytes, 2):
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, what: str, dim: int, lengths: tuple[int, ...] = ()) -> torch.Tensor:
        """Return the ranks' tensors, joined along `dim`; `lengths` there if they are not equal."""
        tensor = tensor.movedim(dim, 0)
        longest = max(lengths, default=tensor.shape[0])
        if tensor.shape[0] < longest:
            rest = tensor.new_zeros((longest - tensor.shape[0], *tensor.shape[1:]))
            tensor = torch.cat([tensor, rest])
        tensor = tensor.contiguous()
        out = tensor.new_empty((self.size, *tensor.shape))
        self._count("all_gather", out)
        with translated(self.part, f"all-gather of {what}"), self._inner(out.nbytes):
            dist.all_gather(list(out.unbind(0)), tensor, group=self.group)
        if lengths and min(lengths) < longest:
            whole = torch.cat([each[:length] for each, length in zip(out, lengths, strict=True)])
        else:
            whole = out.flatten(0, 1)
        return whole.movedim(0, dim).contiguous()

    def reduce_scatter(self, tensor: torch.Tensor, what: str, dim: int) -> torch.Tensor:
        """Return this rank's piece along `dim`, which the number of ranks divides, of the sum over the ranks."""
        pieces = [each.contiguous() for each in tensor.chunk(self.size, dim)]
        self._count("reduce_scatter", tensor)
        out = torch.empty_like(pieces[self.rank])
        with translated(self.part, f"reduce-scatter of {what}"), self._inner(tensor.nbytes):
            dist.reduce_scatter(out, pieces, group=self.group)
        return out

    def _inner(self, nbytes: int, passes: int = 1) -> AbstractContextManager[None]:
        return inner_exchange(self.part, DEGREE, ring_sent_bytes(nbytes, self.size, passes))

    def _count(self, kind: str, tensor: torch.Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += tensor.nbytes


def tensor_ranks(mesh: Mesh) -> TensorRanks:
    """Return this rank's tensor group; to be called by all ranks."""
    group = mesh.group(DEGREE)
    assert group is not None, f"{mesh} has one tensor rank"
    return TensorRanks(mesh.part(DEGREE), group, mesh.rank(DEGREE), mesh.size(DEGREE))

"""Data parallelism by one reducer: gradients of this rank become the mean over all ranks with its parameters."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ...comm.reducer.options import ReducerOptions
from ...comm.reducer.reducer import GradientReducer
from ...core.vocabulary.rules import MOST_ZERO
from ..model import Strategy
from ..split import is_of_expert
from .buffers import BufferSync
from .model_changes import class_of


class DataParallel(Strategy):
    """Gradients are exchanged while backward runs; at stages 1 and 2 of ZeRO a rank gets its rows of the sums."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Below stage 3, where several ranks have the same parameters and agree in each step."""
        return self.plan.zero < MOST_ZERO and self.distributed.exchanges

    def apply(self) -> None:
        """Exchange the gradients of all parameters but those of experts that are divided."""
        replicas, own = self.mesh.replicas, self.distributed
        shards = None
        if self.plan.zero:
            assert replicas.group is not None, "a world of one divides nothing"
            shards = DeviceMesh.from_group(replicas.group, replicas.device.type, mesh_dim_names=("shard",))
        named = [(name, each) for name, each in own.parameters_here(self.model) if not is_of_expert(each)]
        options = ReducerOptions(model=class_of(self.model), mesh=shards, is_compared=own.is_whole)
        own.reducer = own.exchange = GradientReducer(replicas, named, self.plan, options)
        if self.plan.buffers == "mean":
            own.reducer.add_extra_tensors(BufferSync(replicas, self.model))

"""Gradients of which each rank keeps its rows: where they lie, and the DTensors that ``parameter.grad`` becomes.

Once the mean has arrived, ``parameter.grad`` is a DTensor of the parameter's shape, divided along its first
dimension. So `torch.nn.utils.clip_grad_norm_`, a `GradScaler` and ``grad.norm()`` see the mean of all ranks, as
they do under FSDP2.

[Note: earlier shards] Autograd cannot add a gradient to a DTensor. So right before it adds, the DTensor of an
earlier pass is taken off the parameter, and added to what the next exchange brings. That hook is one of autograd's
node for the parameter, which `torch.autograd.grad` does not run: it changes no ``.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .grad_ownership import UNHELD, FlatGradients, references, replace_grad
from .parameters import RowBlocks


class GradShards:
    """This rank's rows of the mean gradients of a bucket. A `Gradients`."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        blocks: RowBlocks,
        mesh: DeviceMesh,
        block: int,
        memory: torch.Tensor,
    ) -> None:
        """`block`: that of this rank, which is to lie in `memory`."""
        self.parameters = list(parameters)
        self.unused: list[int] = []
        """Positions of members without a gradient on this rank, in the last `take`."""
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        self._blocks, self._mesh, self._block = blocks, mesh, block
        self._earlier: dict[int, torch.Tensor] = {}
        """Shards that the next ones are added to, by position. See [Note: earlier shards]."""
        self._version_used = -1
        self.lie_in(memory)

    # -- one exchange --------------------------------------------------------------------------

    def set_aside(self, position: int) -> None:
        """Take the shard of an earlier exchange off a member. See [Note: earlier shards]."""
        parameter = self.parameters[position]
        if parameter.grad is None:
            self._earlier.pop(position, None)  # the loop has cleared the gradients since
        elif isinstance(parameter.grad, DTensor):
            self._earlier[position] = parameter.grad.to_local().clone()
            replace_grad(parameter, None)

    @property
    def has_set_aside(self) -> bool:
        """Whether a member's shard is kept for the next exchange."""
        return bool(self._earlier)

    def must_leave_memory(self) -> bool:
        """Set aside what the members have of earlier exchanges; return whether other code holds memory of it.

        Then the coming exchange needs other memory, see `lie_in`.
        """
        for i in range(len(self.parameters)):
            self.set_aside(i)
        is_held = any(count > UNHELD for count in references(self._shards))
        return is_held or (self._uses is not None and self._count_uses() > self._uses)

    @torch.no_grad()
    def take(self) -> list[torch.Tensor | None]:
        """Take the gradients off the members, which have none until `finalize`, and return them by position."""
        gradients = [parameter.grad for parameter in self.parameters]
        self.unused = [i for i, gradient in enumerate(gradients) if gradient is None]
        for parameter in self.parameters:
            replace_grad(parameter, None)
        return gradients

    @torch.no_grad()
    def finalize(self, ranks: Sequence[float]) -> None:
        """Let the shards be the gradients.

        `ranks`: how many had a gradient, by member, where some are `unused`.
        """
        for i, parameter in enumerate(self.parameters):
            earlier = self._earlier.pop(i, None)
            if self.unused and not ranks[i]:
                if earlier is None:
                    continue
                self.locals[i].copy_(earlier)
            elif earlier is not None:
                self.locals[i].add_(earlier)
            replace_grad(parameter, self._shards[i])

    # -- between exchanges ---------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """See `Gradients`."""
        return any(map(self._lies_here, range(len(self.parameters))))

    @property
    def is_finite(self) -> bool:
        """See `Gradients`; looks at this rank's rows."""
        return bool(torch.isfinite(self.memory).all())

    def note_used(self) -> None:
        """See `Gradients`."""
        self._version_used = self.memory._version

    def holds_used(self, position: int) -> bool:
        """See `Gradients`."""
        return self._version_used == self.memory._version and self._lies_here(position)

    def zero_missing(self) -> None:
        """See `Gradients`."""
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self.locals[i].zero_()
                replace_grad(parameter, self._shards[i])

    # -- where they lie ------------------------------------------------------------------------

    def lie_in(self, memory: torch.Tensor) -> None:
        """Have the coming means in `memory`; what is in the old one is left to who holds it."""
        self.memory = memory
        """This rank's block of the mean, with its tail."""
        self.locals = self._blocks.views(self.memory, self._block)
        """The rows, by member."""
        self._shards: list[torch.Tensor] = [
            DTensor.from_local(
                local, self._mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            for local, parameter in zip(self.locals, self.parameters, strict=True)
        ]
        self._uses: int | None = None

    def note_uses(self) -> None:
        """Count the uses of the memory while only the bucket has it: before its first gradients are the mean."""
        if self._uses is None:
            self._uses = self._count_uses()

    def _lies_here(self, position: int) -> bool:
        gradient = self.parameters[position].grad
        if not isinstance(gradient, DTensor):
            return False
        return gradient.to_local().data_ptr() == self.locals[position].data_ptr()

    def _count_uses(self) -> int:
        return int(torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata))


class WholeGradients(FlatGradients):
    """Gradients of numbers without dimensions, which all ranks have: replicated DTensors beside those of shards.

    torch's clipping and its `GradScaler` take no mixture of DTensors and other tensors.
    """

    mesh: DeviceMesh

    def set_aside(self, position: int) -> None:
        """Let a member's gradient be a plain tensor, to which autograd can add."""
        gradient = self.parameters[position].grad
        if isinstance(gradient, DTensor):
            replace_grad(self.parameters[position], gradient.to_local())

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `FlatGradients`."""
        for i in range(len(self.parameters)):
            self.set_aside(i)
        super().load(weight)

    @torch.no_grad()
    def finalize(self, ranks: Sequence[float]) -> None:
        """See `FlatGradients`. The means are DTensors then."""
        super().finalize(ranks)
        for parameter in self.parameters:
            if parameter.grad is not None:
                whole = DTensor.from_local(parameter.grad, self.mesh, [Replicate()], run_check=False)
                replace_grad(parameter, whole)

    def _lies_here(self, position: int) -> bool:
        gradient = self.parameters[position].grad
        if isinstance(gradient, DTensor):
            return gradient.to_local().data_ptr() == self.views[position].data_ptr()
        return super()._lies_here(position)


def is_accumulating(parameter: torch.Tensor) -> bool:
    """In a hook on the gradient of `parameter`: return whether that will be added to ``parameter.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node))
    except RuntimeError:  # torch's answer for a leaf in `torch.autograd.grad`
        return False

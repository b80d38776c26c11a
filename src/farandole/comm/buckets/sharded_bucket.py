"""A bucket of which each rank gets the mean of its rows alone: ZeRO stages 1 and 2.

The gradients are copied into blocks of rows, one a rank, in memory that all buckets use round-robin, and freed.
What arrives is this rank's block; see `gradients.grad_shards` for what becomes of it.

Behind the rows every block has a tail with the used mask and the marks of the step, as a dense bucket has once; so
each rank finds their sums in its own block.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..gradients.grad_ownership import FEW_LARGE_ELEMENTS
from ..gradients.grad_shards import GradShards, WholeGradients
from ..gradients.row_blocks import RowBlocks
from ..gradients.squares import square_sum
from ..routes.route import Route
from ..rows.row_exchange import BlockMemory, Region, RowExchange
from ..transport.comm_thread import BucketWork
from .bucket import Bucket, Waitable
from .dense_bucket import DenseBucket
from .step_marks import MARKS, marks_differ, marks_of


class WholeBucket(DenseBucket):
    """Gradients of parameters without dimensions, which cannot be divided: all ranks get all of them."""

    gradients: WholeGradients
    kind = WholeGradients


@dataclass(frozen=True)
class _BucketBlocks:
    """The blocks in a region, laid out as this bucket."""

    lent: BlockMemory
    rows: list[list[torch.Tensor]]
    """By member, then by block."""
    tails: torch.Tensor
    """(blocks, members and marks)."""


class ShardedBucket(Bucket):
    """Dense gradients of one dtype, exact."""

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.nn.Parameter],
        exchange: RowExchange,
        mesh: DeviceMesh,
        *,
        keeps_region: bool,
        multiple: int = 1,
    ) -> None:
        """`parameters`: with one dimension at least; their indices are `members`. `multiple`: see `RowBlocks`.

        `keeps_region`: have memory for all rows, in which this rank's rows stay (stage 1); otherwise use that of
        the pool, and copy this rank's rows out (stage 2). To be made by all ranks alike.
        """
        self.members, self.pending = members, 0
        self._exchange = exchange
        self._blocks = RowBlocks(parameters, exchange.owners, tail=len(members) + MARKS, multiple=multiple)
        self._dtype = parameters[0].dtype
        self._divisor = exchange.divisor_of(self._dtype)
        self._own = exchange.make_region(self._blocks.elements * self._dtype.itemsize) if keeps_region else None
        self._layouts: dict[int, _BucketBlocks] = {}
        """By region, by its identity."""
        memory = self._new_memory() if self._own is None else self._lay_out(self._own).lent.mine
        self.gradients: GradShards = GradShards(parameters, self._blocks, mesh, exchange.block, memory)
        self._region: Region | None = None
        self._work: BucketWork | None = None

    @property
    def sent_bytes(self) -> int:
        """See `Bucket`. Counted."""
        return 0 if self._work is None else self._work.sent_bytes

    def fits(self, route: Route) -> bool:
        """See `Bucket`."""
        return self._exchange.route is route

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. The members have no gradients from now on, until `finalize`."""
        region = self._region = self._exchange.next_region() if self._own is None else self._own
        if self.gradients.must_leave_memory():
            self.gradients.lie_in(self._new_memory() if self._own is None else self._leave(self._own))
        layout, weight = self._lay_out(region), weight * self._divisor
        gradients = self.gradients.take()
        if weight == 0.0:
            layout.lent.flat.zero_()
        else:
            targets, sources = [], []
            for i, gradient in enumerate(gradients):
                if gradient is None:
                    torch._foreach_zero_(layout.rows[i])
                    continue
                for block, target in zip(self._blocks.rows, layout.rows[i], strict=True):
                    targets.append(target)
                    sources.append(gradient[block[i].begin : block[i].end])
            if self.gradients.nbytes >= FEW_LARGE_ELEMENTS * self._dtype.itemsize * len(self.members):
                for source, target in zip(sources, targets, strict=True):
                    torch.mul(source, weight, out=target)
            elif targets:
                torch._foreach_copy_(targets, sources)
                torch._foreach_mul_(targets, weight)
        layout.tails.fill_(1)
        # Narrow floats: the tail is not multiplied by the divisor, and more than 0 all the same.
        for i in self.gradients.unused:
            layout.tails[:, i] = 0

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        raise AssertionError("nothing is carried over to a sharded gradient")

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        assert self._region is not None, "a bucket is loaded before it is launched"
        self.gradients.note_uses()
        lent = self._loaded.lent
        self._work = self._exchange.reduce_scatter(self._region, lent, self.gradients.memory)
        return self._work

    def finalize(self) -> None:
        """See `Bucket`. The gradients are DTensors then."""
        self._region = None
        self.gradients.finalize(self._tail.tolist() if self.gradients.unused else ())

    def own_square(self) -> torch.Tensor:
        """See `Bucket`."""
        return square_sum([block for rows in self._loaded.rows for block in rows]) / self._divisor**2

    def mean_square(self, rank: int, size: int) -> torch.Tensor:
        """See `Bucket`: this rank's rows."""
        return square_sum(self.gradients.locals)

    def mark_steps(self, steps: int | None) -> bool:
        """See `Bucket`."""
        assert self._region is not None, "a bucket is loaded before it is marked"
        marks = self._loaded.tails[:, -MARKS:]
        if steps is None:
            marks.zero_()
        else:
            marks.copy_(marks_of(steps, marks.device))
        return True

    @property
    def steps_differ(self) -> bool:
        """See `Bucket`."""
        return marks_differ(self._tail[-MARKS:])

    @property
    def _tail(self) -> torch.Tensor:
        """How many ranks used each member, and the marks of all, times the factor of narrow floats."""
        begin = self._blocks.tail
        return self.gradients.memory[begin : begin + len(self.members) + MARKS]

    @property
    def _loaded(self) -> _BucketBlocks:
        """Where the gradients lie between `load` and `finalize`."""
        return self._layouts[id(self._region)]

    def _new_memory(self) -> torch.Tensor:
        return torch.zeros(self._blocks.block_elements, dtype=self._dtype)

    def _leave(self, region: Region) -> torch.Tensor:
        """Leave the memory of a region of its own to those who hold shards in it; return this rank's new block."""
        lent = self._layouts[id(region)].lent
        if lent.shared is None:
            region.memory = torch.zeros_like(region.memory)
            del self._layouts[id(region)]
            return self._lay_out(region).lent.mine
        lent.shared.leave_memory()
        left = self._exchange.blocks_in(lent.shared.mine, lent.shared)
        self._layouts[id(region)] = self._cut(left)
        return left.mine

    def _lay_out(self, region: Region) -> _BucketBlocks:
        layout = self._layouts.get(id(region))
        if layout is None:
            lent = self._exchange.lay_out(region, self._blocks.block_elements, self._dtype)
            layout = self._layouts[id(region)] = self._cut(lent)
        return layout

    def _cut(self, lent: BlockMemory) -> _BucketBlocks:
        blocks = self._blocks
        by_block = [blocks.cut(lent.flat, block) for block in range(len(blocks.owners))]
        tails = lent.flat.view(len(blocks.owners), -1)[:, blocks.tail : blocks.tail + len(self.members) + MARKS]
        return _BucketBlocks(lent, [[rows[i] for rows in by_block] for i in range(len(self.members))], tails)

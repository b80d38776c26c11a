"""A bucket of which each rank gets the mean of its rows alone: ZeRO stages 1 and 2.

The gradients are copied into blocks of rows, one a rank, in memory that all buckets use round-robin, and freed.
What arrives is this rank's block; see [Note: earlier shards] for what becomes of it.

Behind the rows every block has a tail with the used mask and the marks of the step, as a dense bucket has once; so
each rank finds their sums in its own block.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
sections 5.1 and 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...core.vocabulary.codec_spec import CodecSpec
from ..codecs.codec import is_finite
from ..codecs.registry import require_packer
from ..codecs.saved_state import Entry
from ..messages import Message, Reduction
from ..routes import Route
from ..transport.comm_thread import BucketWork, SegmentWork
from .bucket import MARKS, Bucket, DenseBucket, Waitable, marks_differ, marks_of
from .coded_bucket import NO_STEPS, NOTHING, BucketFlags, steps_byte
from .grad_ownership import FEW_LARGE_ELEMENTS, UNHELD, FlatGradients, references, replace_grad
from .parameters import RowBlocks, Rows, square_sum
from .row_exchange import BlockMemory, CodedSums, Region, RowExchange, draws_of

# Gradients of which each rank keeps its rows: where they lie, and the DTensors that ``parameter.grad`` becomes.
#
# Once the mean has arrived, ``parameter.grad`` is a DTensor of the parameter's shape, divided along its first
# dimension. So `torch.nn.utils.clip_grad_norm_`, a `GradScaler` and ``grad.norm()`` see the mean of all ranks, as
# they do under FSDP2.
#
# [Note: earlier shards] Autograd cannot add a gradient to a DTensor. So right before it adds, the DTensor of an
# earlier pass is taken off the parameter, and added to what the next exchange brings. That hook is one of
# autograd's node for the parameter, which `torch.autograd.grad` does not run: it changes no ``.grad``.


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


# A bucket of shards whose gradients go to their owners by a quantised codec.
#
# Beside the blocks travels an announcement, as with `CodedBucket`: who has which gradient, how many steps a rank
# has made, and whether its gradients hold NaN or infinity. Such a rank sends zeros, and the mean is NaN on all
# ranks.


class CodedShardBucket(ShardedBucket):
    """See the module. Gradients are float32."""

    owns_rows = True

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.nn.Parameter],
        exchange: RowExchange,
        mesh: DeviceMesh,
        *,
        keeps_region: bool,
        codec: CodecSpec,
    ) -> None:
        """As `ShardedBucket`; `codec` is a quantised one."""
        self._packer = require_packer(codec)
        super().__init__(
            members, parameters, exchange, mesh, keeps_region=keeps_region, multiple=self._packer.block
        )
        self._codec = codec
        self._sums = CodedSums(self._packer, has_feedback=bool(codec.options["feedback"]))
        self._steps = NO_STEPS
        self._announced = NOTHING

    @property
    def spec(self) -> CodecSpec:
        """See `Bucket`."""
        return self._codec

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`."""
        super().load(weight)
        blocks = self._loaded
        blocks.tails.zero_()  # it would be rounded with the rows
        self._steps, self.nonfinite_members = NO_STEPS, []
        if not bool(torch.isfinite(blocks.lent.flat.sum())):
            found = [
                i for i, rows in enumerate(blocks.rows) if not all(bool(row.isfinite().all()) for row in rows)
            ]
            self.nonfinite_members = [self.members[i] for i in found]
            if found:
                blocks.lent.flat.zero_()

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        assert self._region is not None, "a bucket is loaded before it is launched"
        self.gradients.note_uses()
        announcement = SegmentWork(self._announce, self._take_announcements, route.everyone)
        first = self._exchange.first_block
        self._sums.hold_back(
            (row, slice(each.offset, each.offset + math.prod(each.lengths)))
            for row in range(self._exchange.hosts)
            for each in [self._blocks.rows[first + row][i] for i in self.gradients.unused]
        )
        self._work = self._exchange.reduce_scatter(
            self._region, self._loaded.lent, self.gradients.memory, coding=self._sums, first=[announcement]
        )
        return self._work

    def find_overflow(self) -> list[bool]:
        """See `Bucket`."""
        if self.had_nonfinite or is_finite(self.gradients.memory):
            return super().find_overflow()
        return [not is_finite(rows) for rows in self.gradients.locals]

    @torch.no_grad()
    def finalize(self) -> None:
        """See `Bucket`."""
        self._region = None
        self._sums.end()
        if self.had_nonfinite:
            self.gradients.memory.fill_(torch.nan)
        self.gradients.finalize(self._announced.users() if self.gradients.unused else ())

    def mark_steps(self, steps: int | None) -> bool:
        """See `Bucket`."""
        self._steps = steps_byte(steps)
        return True

    @property
    def steps_differ(self) -> bool:
        """See `Bucket`."""
        return self._announced.steps_differ

    def roll_back(self) -> None:
        """See `Bucket`."""
        self._sums.restore()

    def state(self, names: Sequence[str]) -> dict[str, Entry]:
        """Return what packing keeps on this rank, by parameter. `names`: of the members."""
        place, (lost, draws) = self._exchange.place(self._codec), self._sums.kept
        entries = {}
        for i, (name, parameter) in enumerate(zip(names, self.gradients.parameters, strict=True)):
            residual = torch.zeros(parameter.shape, dtype=torch.float32) if lost else None
            if residual is not None:
                for each, rows in zip(self._travelling, self._views(lost), strict=True):
                    residual[each[i].begin : each[i].end] = rows[i]
            entries[name] = place.entry(residual, draws)
        return entries

    def load_state(self, names: Sequence[str], entries: dict[str, Entry]) -> None:
        """Move what `entries` have of the members into this bucket; the others begin anew.

        Raises `ConfigError`, and changes nothing, for an entry of another rank or layout.
        """
        place, me = self._exchange.place(self._codec), self._exchange.route.circle.seat.rank
        found = {i: place.residual(name, entries[name]) for i, name in enumerate(names) if name in entries}
        length = self._blocks.block_elements
        lost = [torch.zeros(length, dtype=torch.float32) for _ in range(self._exchange.hosts)]
        for number, (each, rows) in enumerate(zip(self._travelling, self._views(lost), strict=True)):
            for i, residual in found.items():
                if number != me and residual is not None:
                    rows[i].copy_(residual[each[i].begin : each[i].end])
        self._sums.load(lost, draws_of(entries.pop(names[i]) for i in found))

    @property
    def _travelling(self) -> list[list[Rows]]:
        """The layout of the blocks that are packed, by rank of the circle."""
        first = self._exchange.first_block
        return self._blocks.rows[first : first + self._exchange.hosts]

    def _views(self, blocks: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        first = self._exchange.first_block
        return [self._blocks.views(block, first + number) for number, block in enumerate(blocks)]

    def rescale(self, change: float) -> None:
        """See `Bucket`."""
        self._sums.rescale(change)

    def _announce(self) -> Reduction:
        flags = (bool(self.nonfinite_members),)
        mine = BucketFlags.of_rank(flags, self._steps, len(self.members), self.gradients.unused)
        return (yield Message(mine.pack(), "all_gather"))

    def _take_announcements(self, rows: Any) -> None:
        self._announced = BucketFlags.unpack(rows, flags=1)
        self.had_nonfinite = bool(self._announced.flags.any())

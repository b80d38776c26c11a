"""A bucket of which each rank gets the mean of its rows alone: ZeRO stages 1 and 2.

The gradients are copied into blocks of rows, one a rank, in memory that all buckets use round-robin, and freed.
What arrives is this rank's block; see `grad_shards` for what becomes of it.

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

from ...core.vocabulary.codec_spec import CodecSpec
from ..codecs.codec import is_finite
from ..codecs.registry import require_packer
from ..codecs.saved_state import Entry
from ..messages import Message, Reduction
from ..routes import Route
from ..transport.comm_thread import BucketWork, SegmentWork
from .bucket import MARKS, Bucket, DenseBucket, Waitable, marks_differ, marks_of
from .coded_bucket import NO_STEPS, NOTHING, BucketFlags, steps_byte
from .grad_ownership import FEW_LARGE_ELEMENTS
from .grad_shards import GradShards, WholeGradients
from .parameters import RowBlocks, Rows, square_sum
from .row_coding import CodedSums, draws_of
from .row_exchange import BlockMemory, Region, RowExchange


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

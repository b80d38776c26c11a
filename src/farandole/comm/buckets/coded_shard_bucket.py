"""A bucket of shards whose gradients go to their owners by a quantised codec.

Beside the blocks travels an announcement, as with `CodedBucket`: who has which gradient, how many steps a rank has
made, and whether its gradients hold NaN or infinity. Such a rank sends zeros, and the mean is NaN on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...core.vocabulary.codec_spec import CodecSpec
from ..codecs.finite import is_finite
from ..codecs.registry import require_packer
from ..gradients.row_blocks import Rows
from ..messages.message import Message, Reduction
from ..routes.route import Route
from ..rows.row_coding import CodedSums
from ..rows.row_exchange import RowExchange
from ..rows.row_state import draws_of
from ..sessions.saved_state import Entry
from ..transport.comm_thread import SegmentWork
from .bucket import Waitable
from .coded_bucket import NO_STEPS, NOTHING, BucketFlags, steps_byte
from .sharded_bucket import ShardedBucket


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

"""Blocks of rows between the ranks: sums of all ranks' blocks to their owners, and rows of owners to all ranks.

The memory that travels is a pool of a few regions, used round-robin: it stays in the cache, and does not grow with
the model.

[Note: who has which block] Inside a host a rank adds up a slice of the tensor, which is its local rank's share.
Across hosts the ranks with one local rank exchange that slice. So blocks are ordered by local rank first, then by
host; without hosts of several ranks, by rank.

[Note: a region is free again] A region may be written again when this rank's own call is over. Within a host the
ranks have met after the last one read it; what goes across is taken by the kernel before a call is over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.link import ring_sent_bytes
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError
from ..codecs.quantize import Packer
from ..codecs.saved_state import Entry
from ..messages import accumulates_in_fp32, sum_into
from ..routes import Route
from ..transport.comm_thread import ITEM_TAGS, BucketWork, SegmentWork
from ..transport.rank_group import PieceExchange
from ..transport.shared_tensor import SharedRegion, SharedTensor
from ..world.store_sync import all_gather_json
from ..world.world import World

SEGMENT_BYTES = 256 * 1024
"""Bytes of a block that travel at once: while they are added up, the next ones are on their way."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass
class Region:
    """Memory of one exchange at a time."""

    shared: SharedRegion | None
    """What the ranks of a host map; None: this process's own memory."""
    memory: torch.Tensor
    """This rank's part, uint8."""
    work: BucketWork | None = None
    """The last exchange that used it."""


@dataclass(frozen=True)
class BlockMemory:
    """The blocks of this rank in one region."""

    flat: torch.Tensor
    """All of them, one after the other."""
    shared: SharedTensor | None
    """What `flat` is this rank's part of."""
    travels: list[torch.Tensor]
    """Those that go by messages, by rank of the route's circle; none inside one host."""
    mine: torch.Tensor
    """The block of this rank's own rows."""


class _Gather(NamedTuple):
    """One layout of a region for rows to all ranks."""

    lent: BlockMemory
    blocks: list[torch.Tensor]
    """All ranks', in the order of owners, as this rank reads them."""
    spreads: list[Callable[[], Generator[PieceExchange, torch.Tensor, None]]]


class RowExchange:
    """What exchanges blocks by one route, with its pool of regions. To be made by all ranks."""

    def __init__(self, world: World, route: Route, *, region_bytes: int, regions: int) -> None:
        self.size = world.size
        self.route = route
        self._memory = route.memory
        places = all_gather_json(
            world,
            "places of shards",
            [self._memory.local_rank if self._memory else 0, world.node_rank, world.rank],
        )
        self.owners = [rank for _, _, rank in sorted(places)] if self._memory else list(range(world.size))
        """Rank by block. See [Note: who has which block]."""
        self.block = self.owners.index(world.rank)
        self.regions = [self.make_region(region_bytes) for _ in range(regions)]
        self._turn = 0
        self._gathers: dict[tuple[int, int, torch.dtype], _Gather] = {}
        """By region, length of a block and type: what `all_gather` lays out once."""

    @property
    def hosts(self) -> int:
        """Ranks among which a slice goes by messages; 1 where nothing does."""
        return 1 if self.route.route == "shared" else len(self.route.circle.ranks)

    @property
    def first_block(self) -> int:
        """The first block that goes by messages from this rank; the next `hosts` - 1 follow it."""
        return 0 if self._memory is None else self._memory.local_rank * self.hosts

    def place(self, codec: CodecSpec) -> RowPlace:
        """Return where this rank stands among those that pack blocks for each other by `codec`."""
        return RowPlace(codec, self.size, self.hosts, self.route.circle.seat.rank, self.first_block)

    @property
    def region_bytes(self) -> int:
        """Bytes of a region on this rank."""
        return self.regions[0].memory.numel()

    def divisor_of(self, dtype: torch.dtype) -> int:
        """Return what sums are divided by in float32: the number of ranks for narrow floats, else 1."""
        return self.size if accumulates_in_fp32(dtype) else 1

    def next_region(self) -> Region:
        """Return the region whose turn it is, when its last exchange is over."""
        region = self.regions[self._turn % len(self.regions)]
        self._turn += 1
        if region.work is not None:
            region.work.wait()
        return region

    def lay_out(self, region: Region, block_elements: int, dtype: torch.dtype) -> BlockMemory:
        """Return the blocks of this rank in a region."""
        elements = block_elements * len(self.owners)
        if region.shared is None or self._memory is None:
            return self.blocks_in(region.memory[: elements * dtype.itemsize].view(dtype), None)
        shared = self._memory.tensor_in(region.shared, elements, dtype)
        return self.blocks_in(shared.mine, shared)

    def blocks_in(self, flat: torch.Tensor, shared: SharedTensor | None) -> BlockMemory:
        """Return the blocks of this rank in `flat`, which may be its part of `shared`."""
        start = 0 if shared is None else shared.slice_bounds(shared.local_rank)[0]
        length = flat.numel() // len(self.owners)
        travels = (
            list(flat[start : start + self.hosts * length].view(self.hosts, length)) if self.hosts > 1 else []
        )
        return BlockMemory(flat, shared, travels, flat[self.block * length : (self.block + 1) * length])

    # -- sums ----------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        region: Region,
        lent: BlockMemory,
        out: torch.Tensor,
        *,
        coding: CodedSums | None = None,
        first: Sequence[SegmentWork] = (),
    ) -> BucketWork:
        """Begin to add up all ranks' blocks, over `divisor_of`; this rank's block of the sum arrives in `out`.

        `out` may be this rank's own block. `coding`: how blocks go by messages; None: as they are. `first`: what
        else the ranks exchange before.
        """
        shared, is_narrow = lent.shared, accumulates_in_fp32(out.dtype)
        prepare: Callable[[], object] | None = None
        if shared is not None:
            divisor = len(shared.parts) if is_narrow else 1
            in_place = self.hosts > 1 or out.data_ptr() == lent.mine.data_ptr()
            prepare = (
                partial(shared.reduce_scatter, divisor) if in_place else partial(shared.reduce_into, out, divisor)
            )
        if coding is None:
            sums = self._sums(lent.travels, out, self.hosts if is_narrow else 1)
        else:
            coding.begin(lent.travels)
            sums = coding.sums(lent.travels, out, self.route.circle.seat.rank)
        items = [*first, *(SegmentWork(begin, _ignore, self.route.circle) for begin in sums)]
        assert self.route.conductor is not None, "shards travel by a conductor"
        # With something to do at its end, a job waits until all that it sends is taken.
        region.work = self.route.conductor.submit(items, prepare=prepare, complete=_nothing)
        return self._counted(region.work, lent)

    def _sums(
        self, rows: Sequence[torch.Tensor], out: torch.Tensor, divisor: int
    ) -> list[Callable[[], Generator[PieceExchange, torch.Tensor, None]]]:
        if not rows:
            return []
        me, count = self.route.circle.seat.rank, out.numel()

        def one(begin: int, end: int) -> Generator[PieceExchange, torch.Tensor, None]:
            parts = [row[begin:end] for row in rows]
            received = [part if i == me else torch.empty_like(part) for i, part in enumerate(parts)]
            yield PieceExchange(
                [_NOTHING if i == me else _bytes(part) for i, part in enumerate(parts)],
                [_NOTHING if i == me else _bytes(part) for i, part in enumerate(received)],
            )
            # Mine first: `out` may be mine.
            sum_into(out[begin:end], [received[me], *received[:me], *received[me + 1 :]], divisor)

        return [partial(one, begin, end) for begin, end in _segments(count, out.itemsize)]

    # -- rows to all ranks ---------------------------------------------------------------------

    def all_gather(
        self,
        block_elements: int,
        dtype: torch.dtype,
        write: Callable[[torch.Tensor], object],
        read: Callable[[Sequence[torch.Tensor]], object],
    ) -> BucketWork:
        """Begin to give all ranks the rows of all.

        `write` puts this rank's rows into its block; `read` takes them from all blocks, in their order. Both are
        called by the thread that drives the route.
        """
        region = self.next_region()
        key = (id(region), block_elements, dtype)
        if key not in self._gathers:
            self._gathers[key] = self._lay_out_gather(region, block_elements, dtype)
        gather = self._gathers[key]
        items = [SegmentWork(begin, _ignore, self.route.circle) for begin in gather.spreads]

        def complete() -> None:
            if gather.lent.shared is not None:
                gather.lent.shared.meet()
            read(gather.blocks)

        assert self.route.conductor is not None, "rows travel by a conductor"
        region.work = self.route.conductor.submit(
            items, prepare=partial(write, gather.lent.mine), complete=complete
        )
        return self._counted(region.work, gather.lent)

    def _counted(self, work: BucketWork, lent: BlockMemory) -> BucketWork:
        """Count what goes through memory alone as a ring would send it: nothing of it is a message."""
        if self.hosts == 1:
            work.sent_bytes = ring_sent_bytes(lent.flat.nbytes, self.size, passes=1)
        return work

    def _lay_out_gather(self, region: Region, length: int, dtype: torch.dtype) -> _Gather:
        lent = self.lay_out(region, length, dtype)
        parts = [lent.flat] if lent.shared is None else lent.shared.parts
        per_part = len(self.owners) // len(parts)
        blocks = [parts[b // per_part][b * length : (b + 1) * length] for b in range(len(self.owners))]
        return _Gather(lent, blocks, self._spreads(lent.travels))

    def _spreads(
        self, rows: Sequence[torch.Tensor]
    ) -> list[Callable[[], Generator[PieceExchange, torch.Tensor, None]]]:
        if not rows:
            return []
        me = self.route.circle.seat.rank

        def one(begin: int, end: int) -> Generator[PieceExchange, torch.Tensor, None]:
            mine = _bytes(rows[me][begin:end])
            yield PieceExchange(
                [_NOTHING if i == me else mine for i in range(len(rows))],
                [_NOTHING if i == me else _bytes(row[begin:end]) for i, row in enumerate(rows)],
            )

        return [partial(one, begin, end) for begin, end in _segments(rows[0].numel(), rows[0].itemsize)]

    def make_region(self, byte_count: int) -> Region:
        """Return a region beside those of the pool; to be called by all ranks alike."""
        if self._memory is None:
            return Region(None, torch.zeros(byte_count, dtype=torch.uint8))
        shared = self._memory.allocate_region(byte_count)
        return Region(shared, shared.memory[self._memory.local_rank])


def _segments(count: int, itemsize: int) -> list[tuple[int, int]]:
    """Return where the segments of `count` elements begin and end."""
    step = max(SEGMENT_BYTES // itemsize, -(-count // (ITEM_TAGS - 1)))
    return [(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _ignore(_: Any) -> None:
    return None


def _nothing() -> None:
    return None


# Blocks of rows in fewer bits: gradients on their way to their owners, and changes of parameters from them.
#
# Gradients: what packing loses of a block is added to it in the next step (error feedback, as in `codecs.codec`).
# The owner's own contribution is exact, and so is its sum.
#
# Changes: every rank adds the same decoded change to a parameter, the owner too, so all hold the same bits. What
# packing loses stays in the owner's exact rows, and is part of the next change.


SEGMENT_ELEMENTS = 256 * 1024
"""Elements of a block that travel at once."""
Sum = Generator[PieceExchange, torch.Tensor, None]


class CodedSums:
    """Packs the blocks of one bucket, and keeps what was lost of each. Takes float32."""

    def __init__(self, packer: Packer, *, has_feedback: bool) -> None:
        self._packer, self._has_feedback = packer, has_feedback
        self._lost: list[torch.Tensor] = []
        """By rank of the circle."""
        self._before: list[torch.Tensor] = []
        """The same before the last exchange, in memory that the next one writes."""
        self._held: list[tuple[int, slice]] = []
        """Parts of rows for which nothing is asked in this exchange."""
        self._draws = 0

    def begin(self, rows: Sequence[torch.Tensor]) -> None:
        """Prepare for an exchange of `rows`, the blocks by rank of the circle."""
        if not self._lost:
            self._lost = [torch.zeros_like(row) for row in rows] if self._has_feedback else []
            self._before = [torch.zeros_like(row) for row in self._lost]
        self._lost, self._before = self._before, self._lost
        if self._has_feedback:
            for i, part in self._held:
                rows[i][part] = -self._before[i][part]

    def hold_back(self, parts: Iterable[tuple[int, slice]]) -> None:
        """Ask for nothing in `parts` of rows in the next exchange: what was lost there waits. Before `begin`."""
        self._held = list(parts)

    def end(self) -> None:
        """Take back what was held back, after an exchange."""
        if self._has_feedback:
            for i, part in self._held:
                # On a rank of the same host they may have a gradient: what was lost of that stays.
                self._lost[i][part] += self._before[i][part]
        self._held = []

    def restore(self) -> None:
        """Keep what was kept before the last exchange."""
        for kept, before in zip(self._lost, self._before, strict=True):
            kept.copy_(before)

    @property
    def kept(self) -> tuple[list[torch.Tensor], int]:
        """What is lost of the blocks, by rank of the circle, and how many random numbers were used.

        No tensors before the first exchange, and without feedback.
        """
        return self._lost, self._draws

    def load(self, lost: list[torch.Tensor], draws: int) -> None:
        """Go on with what `kept` gave."""
        self._draws = draws
        if self._has_feedback:
            self._lost, self._before = lost, [torch.zeros_like(each) for each in lost]

    def rescale(self, change: float) -> None:
        """Multiply what was lost by `change`: gradients have another loss scale from now on."""
        for lost in self._lost:
            lost.mul_(change)

    def sums(self, rows: Sequence[torch.Tensor], out: torch.Tensor, me: int) -> list[Callable[[], Sum]]:
        """Return what adds all ranks' block `me` up into `out`, which may be this rank's own, after `begin`."""
        return [partial(self._sum, rows, out, me, begin, end) for begin, end in self._segments(out.numel())]

    def _segments(self, count: int) -> list[tuple[int, int]]:
        step = max(SEGMENT_ELEMENTS, -(-count // 1000))
        step = -(-step // self._packer.block) * self._packer.block
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def _sum(self, rows: Sequence[torch.Tensor], out: torch.Tensor, me: int, begin: int, end: int) -> Sum:
        packer, length = self._packer, packed_bytes(self._packer, end - begin)
        packed = torch.empty(len(rows), length, dtype=torch.uint8)
        received = torch.empty_like(packed)
        decoded = torch.empty(end - begin, dtype=torch.float32)
        for i, row in enumerate(rows):
            if i == me:
                continue
            asked = row[begin:end]
            if self._has_feedback:
                asked.add_(self._before[i][begin:end])
            self._draws += 1
            packer.pack(asked, packed[i, : packer.packed_bytes(end - begin)], me * 1_000_003 + self._draws)
            if self._has_feedback:
                packer.unpack(packed[i, : packer.packed_bytes(end - begin)], decoded)
                torch.sub(asked, decoded, out=self._lost[i][begin:end])
        yield PieceExchange(
            [_NOTHING if i == me else piece for i, piece in enumerate(packed)],
            [_NOTHING if i == me else piece for i, piece in enumerate(received)],
        )
        total = out[begin:end].copy_(rows[me][begin:end])
        for i, piece in enumerate(received):
            if i != me:
                packer.unpack(piece[: packer.packed_bytes(end - begin)], decoded)
                total.add_(decoded)


def packed_bytes(packer: Packer, count: int) -> int:
    """Return the bytes of `count` packed elements, in whole cache lines."""
    return -(-packer.packed_bytes(count) // 64) * 64


# What packing loses of gradients on their way to the owners of rows, as entries of an exchange state.
#
# The entries are those of `codecs.saved_state`, so that they can be merged with them: one tensor ``residual`` in
# the shape of the parameter. A rank does not pack its own rows, so nothing is lost there.
#
# [Note: residuals of rows] What a rank packs is its part of the mean, already divided by the number of ranks N. So
# what is missing of the mean is the sum of the residuals over the ranks, which is the mean of N times them:
# ``scale`` is N. After a change of ranks, stage or route each rank gets that mean R. Rows are packed by all ranks
# of a circle but their owner: each of these S ranks asks for R / S more.
#
# [Note: a place among owners] Bits come back only to the rank that packed for the same owners. ``place`` says
# which rank of how many in the circle it was, and which slice of a host it carries.


_MARK = -1
_DRAWS = "draws"


@dataclass(frozen=True)
class RowPlace:
    """Where a rank stands among the owners of rows. See [Note: a place among owners]."""

    codec: CodecSpec
    world_size: int
    circle_size: int
    circle_rank: int
    slice_number: int = 0

    def entry(self, residual: torch.Tensor | None, draws: int) -> Entry:
        """Return the entry of a parameter. `residual`: in its shape, float32; None: the codec keeps none.

        `draws`: random numbers that were used so far.
        """
        return {
            "codec": self.codec.to_text(),
            "scale": self.world_size,
            "place": self._numbers,
            "elements": {} if residual is None else {"residual": residual.detach().to("cpu", copy=True)},
            "padding": {},
            "numbers": [{_DRAWS: draws}],
            "others": {},
        }

    def residual(self, name: str, entry: Entry) -> torch.Tensor | None:
        """Return the residual that an entry brings here, in the parameter's shape; None: it has none.

        What belongs to this rank's own rows is not to be used.

        Raises:
            ConfigError: it is that of another rank or layout.
        """
        found: torch.Tensor | None = entry["elements"].get("residual")
        if found is None or entry["place"] == self._numbers:
            return found
        if entry["place"]:
            raise ConfigError(
                f"exchange state: what was lost of {name!r} was saved at another ZeRO stage or by another route: "
                f"its place was {entry['place']}, and is {self._numbers}",
                remedy="give the list of all ranks' states, in order of rank",
            )
        return found / (self.circle_size - 1)

    @property
    def _numbers(self) -> list[int]:
        return [_MARK, self.world_size, self.circle_size, self.circle_rank, self.slice_number]


def draws_of(entries: Iterable[Entry]) -> int:
    """Return how many random numbers were used before, by the parameters that travel together."""
    return max((int(numbers.get(_DRAWS, 0)) for entry in entries for numbers in entry["numbers"]), default=0)


def require_shapes(entries: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ConfigError` for entries of other parameters than those of `shapes`."""
    for name, entry in entries.items():
        for key, tensor in entry["elements"].items():
            if tuple(tensor.shape) != shapes.get(name):
                raise ConfigError(
                    f"exchange state: {key} of {name!r} has shape {tuple(tensor.shape)}, and the parameter has "
                    f"{shapes.get(name, 'another name')}",
                    remedy="load it into the model it was saved from",
                )

"""Parameters whole on all ranks again, after each rank has updated its rows.

Parameters travel side by side in chunks, so that small ones share a message and what is copied stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.step_model.bucket_plan import CHUNK_BYTES, GATHER_REGIONS
from ..codecs.quantize import Packer
from ..routes import Route
from ..transport.comm_thread import BucketWork
from ..world.world import World
from .parameters import RowBlocks
from .row_coding import packed_bytes
from .row_exchange import RowExchange


class _Chunk:
    """Some parameters of one dtype, and where their rows lie."""

    def __init__(self, parameters: Sequence[torch.Tensor], exchange: RowExchange) -> None:
        self.parameters = parameters
        self.blocks = RowBlocks(parameters, exchange.owners)
        self._block = exchange.block
        self._at: list[int] = []
        self._rows: list[list[torch.Tensor]] = []
        self._cut: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Rows in a block, by its address and number: regions stay where they are."""

    @property
    def block_elements(self) -> int:
        """Elements of a block as it travels."""
        return self.blocks.block_elements

    @property
    def travels_as(self) -> torch.dtype:
        """The type of what travels."""
        return self.parameters[0].dtype

    def write(self, mine: torch.Tensor) -> None:
        """Put this rank's rows of the parameters into its block."""
        torch._foreach_copy_(self._rows_in(mine, self._block), self._rows[self._block])

    def read(self, blocks: Sequence[torch.Tensor]) -> None:
        """Take the other ranks' rows."""
        rows = self._rows
        others = [b for b in range(len(rows)) if b != self._block]
        targets = [row for b in others for row in rows[b]]
        sources = [row for b in others for row in self._rows_in(blocks[b], b)]
        torch._foreach_copy_(targets, sources)

    def _rows_in(self, memory: torch.Tensor, block: int) -> list[torch.Tensor]:
        key = (memory.data_ptr(), block)
        if key not in self._cut:
            self._cut[key] = self.blocks.views(memory, block)
        return self._cut[key]

    def look_up_rows(self) -> None:
        """Have views of the rows of all blocks, made anew when a parameter has other memory.

        The thread that reads and writes them asks no parameter: it may be late, and wait for this very thread.
        """
        at = [parameter.data_ptr() for parameter in self.parameters]
        if at != self._at:
            whole = [parameter.detach() for parameter in self.parameters]
            self._at = at
            self._rows = [
                [tensor[each.begin : each.end] for tensor, each in zip(whole, block, strict=True)]
                for block in self.blocks.rows
            ]


class _CodedChunk(_Chunk):
    """The same, of float32, whose changes travel packed. See `row_coding`."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: RowExchange,
        exact: Sequence[torch.Tensor],
        packer: Packer,
    ) -> None:
        """`exact`: this rank's rows as its optimizer has left them, by parameter."""
        super().__init__(parameters, exchange)
        self.blocks = RowBlocks(parameters, exchange.owners, multiple=packer.block)
        self._exact, self._packer = exact, packer
        self._decoded = torch.zeros(self.blocks.block_elements, dtype=torch.float32)
        self._views = [self.blocks.views(self._decoded, block) for block in range(len(self.blocks.owners))]

    @property
    def block_elements(self) -> int:
        """See `_Chunk`: packed bytes."""
        return packed_bytes(self._packer, self.blocks.block_elements)

    @property
    def travels_as(self) -> torch.dtype:
        """See `_Chunk`."""
        return torch.uint8

    def write(self, mine: torch.Tensor) -> None:
        """Put the change of this rank's rows into its block."""
        self._decoded.zero_()
        changes = self._views[self._block]
        torch._foreach_copy_(changes, list(self._exact))
        torch._foreach_sub_(changes, self._rows[self._block])
        self._packer.pack(self._decoded, mine[: self._packer.packed_bytes(self.blocks.block_elements)])

    def read(self, blocks: Sequence[torch.Tensor]) -> None:
        """Add the change of all rows, as all ranks decode it."""
        count = self._packer.packed_bytes(self.blocks.block_elements)
        for rows, views, packed in zip(self._rows, self._views, blocks, strict=True):
            self._packer.unpack(packed[:count], self._decoded)
            torch._foreach_add_(rows, views)


class RowGather:
    """Gives all ranks the rows that each of them has of `parameters`. To be made and called by all ranks alike."""

    def __init__(
        self,
        world: World,
        route: Route,
        parameters: Sequence[torch.Tensor],
        *,
        packed: tuple[Packer, Sequence[torch.Tensor | None]] | None = None,
    ) -> None:
        """`parameters`: each with one dimension at least.

        `packed`: how changes travel, and this rank's exact rows; None: of a parameter that travels as it is.
        """
        exact = [None] * len(parameters) if packed is None else packed[1]
        rows = {id(parameter): row for parameter, row in zip(parameters, exact, strict=True)}
        groups = _chunks(parameters, [row is not None for row in exact])
        size = world.size
        multiple = 1 if packed is None else packed[0].block
        most = max((_padded_bytes(group, size, multiple) for group in groups), default=1)
        self._exchange = RowExchange(world, route, region_bytes=most, regions=GATHER_REGIONS)
        self._chunks = [
            _Chunk(group, self._exchange)
            if packed is None or rows[id(group[0])] is None
            else _CodedChunk(
                group, self._exchange, [row for each in group if (row := rows[id(each)]) is not None], packed[0]
            )
            for group in groups
        ]

    @property
    def chunks(self) -> list[Sequence[torch.Tensor]]:
        """The parameters that travel together, in the order of the parameters."""
        return [chunk.parameters for chunk in self._chunks]

    def look_up(self, number: int) -> None:
        """Have the views of a chunk's parameters that `start` needs: of each one a rank, and what they view."""
        self._chunks[number].look_up_rows()

    @torch.no_grad()
    def start(self, number: int) -> BucketWork:
        """Begin to gather a chunk, whose rows this rank has updated; to be called for the same ones on all ranks.

        Waits while the regions are in use. The work's `wait` raises `PeerLost`, `Stalled` or `Mismatch`.
        """
        chunk = self._chunks[number]
        chunk.look_up_rows()
        return self._exchange.all_gather(chunk.block_elements, chunk.travels_as, chunk.write, chunk.read)


def _chunks(parameters: Sequence[torch.Tensor], are_packed: Sequence[bool]) -> list[list[torch.Tensor]]:
    """Return the parameters side by side, of one dtype each and all packed or none, of about `CHUNK_BYTES`."""
    found: list[list[torch.Tensor]] = []
    kinds = [(parameter.dtype, packed) for parameter, packed in zip(parameters, are_packed, strict=True)]
    for kind in dict.fromkeys(kinds):
        nbytes = CHUNK_BYTES + 1  # the first one begins a chunk, also if it has no elements
        for parameter in (each for each, own in zip(parameters, kinds, strict=True) if own == kind):
            if nbytes + parameter.nbytes > CHUNK_BYTES:
                found.append([])
                nbytes = 0
            found[-1].append(parameter)
            nbytes += parameter.nbytes
    return found


def _padded_bytes(parameters: Sequence[torch.Tensor], size: int, multiple: int) -> int:
    return RowBlocks(parameters, range(size), multiple=multiple).elements * parameters[0].itemsize

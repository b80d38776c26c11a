"""Blocks of rows in fewer bits: gradients on their way to their owners, and changes of parameters from them.

Gradients: what packing loses of a block is added to it in the next step (error feedback, as in
`codecs.codec`). The owner's own contribution is exact, and so is its sum.

Changes: every rank adds the same decoded change to a parameter, the owner too, so all hold the same bits. What
packing loses stays in the owner's exact rows, and is part of the next change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError
from ..codecs.quantize import Packer
from ..codecs.saved_state import Entry
from ..transport.rank_group import PieceExchange

SEGMENT_ELEMENTS = 256 * 1024
"""Elements of a block that travel at once."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
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

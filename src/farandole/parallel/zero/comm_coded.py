"""Gradients and parameters of a unit as packed numbers: FSDP2's custom reduce-scatter and all-gather.

[Note: coded gradients at stage 3] A rank packs what it has for each other rank's shard, with the residual of the
last pass; a rank unpacks what it receives and adds it up in float32, its own part exactly. Nothing is packed a
second time, as in plain data parallel, because each sum stays where it is. What the packing lost is the sender's
to remember, in float32 for all elements of the unit: 4 bytes a parameter that are not sharded.

[Note: coded parameters] A rank packs its shard, and every rank, the owner too, computes with what the packed
numbers stand for. The optimizer goes on with the shard as it is, so that small steps add up (the quantised weights
of ZeRO++, Wang et al. 2023, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ...comm.codecs.codec import is_finite
from ...comm.codecs.quantize import Packer, native_quantize
from ...comm.codecs.registry import packer_of
from ...comm.codecs.saved_state import Entry
from ...comm.engine.parameters import rows_of
from ...comm.engine.row_exchange import RowPlace, draws_of
from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import CommError, ConfigError

# Where the parameters of a unit lie in the rows that FSDP2 reduces, one row for each rank's shards.
#
# A row holds, for each trained parameter in order, that rank's rows of it, filled up to the largest part.

Members = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the parameters that are reduced, in order."""


def elements_of(members: Members, size: int) -> int:
    """Return the elements of a row, among `size` ranks."""
    return sum(_padded(shape, size) for _, shape in members)


def by_name(rows: torch.Tensor, members: Members) -> dict[str, torch.Tensor]:
    """Return what `rows` (ranks, elements) hold, in the shapes of the parameters; copies."""
    found = {}
    for (name, shape), parts in zip(members, _parts(rows, members), strict=True):
        found[name] = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
        for begin, end, part in parts:
            found[name][begin:end] = part
    return found


def put_into(rows: torch.Tensor, members: Members, values: Mapping[str, torch.Tensor], own: int) -> None:
    """Put `values`, by name, into `rows` (ranks, elements); nothing into row `own`."""
    for (name, _), parts in zip(members, _parts(rows, members), strict=True):
        if name in values:
            for number, (begin, end, part) in enumerate(parts):
                if number != own:
                    part.copy_(values[name][begin:end])


def _parts(rows: torch.Tensor, members: Members) -> Iterator[Sequence[tuple[int, int, torch.Tensor]]]:
    """Yield, by member, what each rank has of it: the first row, the one behind the last, and where they lie."""
    size, offset = len(rows), 0
    for _, shape in members:
        found = []
        for number, row in enumerate(rows):
            begin, end = rows_of(shape[0], size, number)
            count = (end - begin) * math.prod(shape[1:])
            found.append((begin, end, row[offset : offset + count].view(end - begin, *shape[1:])))
        yield found
        offset += _padded(shape, size)


def _padded(shape: tuple[int, ...], size: int) -> int:
    return -(-shape[0] // size) * math.prod(shape[1:])


_GATHERING = "gathering packed parameters"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CodedReduceScatter(ReduceScatter):
    """The sum over the ranks of one unit's gradients, packed. See [Note: coded gradients at stage 3]."""

    def __init__(self, here: World, spec: CodecSpec, shards: int) -> None:
        self._here, self._spec, self._shards = here, spec, shards
        packer = packer_of(spec)
        assert packer is not None, f"{spec.name} packs numbers"
        self._packer = packer
        self._keeps = bool(spec.options["feedback"])
        self._native = native_quantize(packer) if self._keeps else None
        self._residual: torch.Tensor | None = None
        """What earlier passes have not sent, a row for each rank."""
        self._next: torch.Tensor | None = None
        """The same after the current pass."""
        self._draws = 0
        self.members: Callable[[], Members] = tuple
        """Returns what is reduced: known when the unit is."""
        self._laid_out: Members = ()
        """What the rows of the residual are of."""
        self._waiting: dict[str, torch.Tensor] = {}
        """Residuals of parameters that are not reduced now, by name and in their shapes."""
        self.sent_bytes: int | None = None
        """What one other rank was sent in the last exchange."""
        self.had_nonfinite = False
        """Whether a gradient or a sum held NaN or infinity since the last `settle`."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Any:
        """See `ReduceScatter`."""
        return torch.empty([int(each) for each in size], dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write this rank's shard of the sum; see `ReduceScatter`."""
        size, mine, piece = group.size(), group.rank(), output_tensor.numel()
        block = self._packer.block if self._native is None else self._native.block
        rows = _whole_blocks(input_tensor.view(size, piece), block)  # FSDP2 has no more use for its input
        if op == dist.ReduceOp.AVG:
            rows.div_(size)
        elif op != dist.ReduceOp.SUM:
            raise ConfigError(
                f"zero = 3 with codec {self._spec.to_text()}: gradients are reduced by {op}, expected their mean",
                remedy="leave set_gradient_divide_factor of the model alone, or use fd.weight",
            )
        self._lay_out(rows, mine, piece)
        before = self._next if self._next is not None else self._residual
        if before is None and self._keeps:
            before = torch.zeros_like(rows)
        packed = _packed_rows(self._packer, size, rows)
        for row in range(size):
            if row != mine:
                self._pack(rows[row], None if before is None else before[row], packed[row])
        received = torch.empty_like(packed)
        self.sent_bytes = packed.shape[1]
        with translated(self._here, "exchanging packed gradients"):
            dist.all_to_all_single(received, packed, group=group)
        total, spare = rows[mine], torch.empty_like(rows[mine])
        length = self._packer.packed_bytes(rows.shape[1])
        for row in range(size):
            if row != mine:
                self._packer.unpack(received[row, :length], spare)
                total.add_(spare)
        # Each element of each rank is in the sum of one rank.
        self.had_nonfinite |= not is_finite(total)
        output_tensor.copy_(total[:piece])
        if self._keeps:
            total.zero_()  # it was added as it is
            self._next = rows
        return None

    def _pack(self, values: torch.Tensor, residual: torch.Tensor | None, packed: torch.Tensor) -> None:
        """Pack `values` and the residual; leave in `values` what was not sent."""
        count = values.numel()
        if self._native is not None and residual is not None and values.is_cpu:
            encode = self._native.kernels.of_format[self._native.how].encode
            encode(values.data_ptr(), residual.data_ptr(), packed.data_ptr(), count, self._native.block)
            return
        if residual is not None:
            values.add_(residual)
        length = self._packer.packed_bytes(count)
        self._draws += 1
        self._packer.pack(values, packed[:length], 1_000_003 * (self._here.rank + 1) + self._draws)
        if residual is not None:
            sent = torch.empty_like(values)
            self._packer.unpack(packed[:length], sent)
            values.sub_(sent)

    def _lay_out(self, rows: torch.Tensor, own: int, piece: int) -> None:
        """Follow what is reduced: parameters may be frozen and thawed between passes, or residuals loaded."""
        members = self.members()
        if members == self._laid_out and not self._waiting.keys() & {name for name, _ in members}:
            return
        if elements_of(members, len(rows)) != piece:
            raise CommError(
                f"{piece} elements of gradients are reduced for each rank, and the trained parameters of the unit "
                f"have {elements_of(members, len(rows))}: it was frozen or thawed while passes were held",
                rank=self._here.job_rank,
                operation="exchanging packed gradients",
                remedy="freeze and thaw parameters after a step, when no pass is held",
            )
        for kept in ("_residual", "_next"):
            before = getattr(self, kept)
            if before is not None or (kept == "_residual" and self._waiting):
                if before is not None:
                    self._waiting |= by_name(before, self._laid_out)
                after = torch.zeros_like(rows)
                put_into(after, members, self._waiting, own)
                setattr(self, kept, after)
        for name, _ in members:
            self._waiting.pop(name, None)
        self._laid_out = members

    def state(self) -> dict[str, Entry]:
        """Return what earlier passes have not sent, by parameter."""
        found: dict[str, torch.Tensor | None] = dict.fromkeys(name for name, _ in self._laid_out)
        found |= self._waiting
        if self._residual is not None:
            found |= by_name(self._residual, self._laid_out)
        return {name: self._place.entry(each, self._draws) for name, each in found.items()}

    def load_state(self, names: Iterable[str], entries: dict[str, Entry]) -> None:
        """Move the `entries` of `names` here, and forget what was there.

        Raises `ConfigError`, and changes nothing, for an entry of another rank or layout.
        """
        own = {name: entries[name] for name in names if name in entries}
        residuals = {name: self._place.residual(name, entry) for name, entry in own.items()}
        self._residual, self._next, self._laid_out = None, None, ()
        self._draws = draws_of(own.values())
        device = self._here.device
        self._waiting = {
            name: each.to(device) for name, each in residuals.items() if each is not None and self._keeps
        }
        for name in own:
            del entries[name]

    @property
    def _place(self) -> RowPlace:
        return RowPlace(self._spec, self._shards, self._shards, self._here.rank % self._shards)

    def settle(self, *, is_used: bool) -> None:
        """End a pass: keep what it left, or, where its gradients are not used, what was there before."""
        if is_used and self._next is not None:
            self._residual = self._next
        self._next, self.had_nonfinite = None, False


class CodedAllGather(AllGather):
    """The parameters of one unit, packed. See [Note: coded parameters]."""

    def __init__(self, here: World, packer: Packer) -> None:
        self._here, self._packer = here, packer
        self.sent_bytes: int | None = None
        """What one other rank was sent in the last exchange; None: the shard as it is."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Any:
        """See `AllGather`."""
        return torch.empty([int(each) for each in size], dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the shards of all ranks, as packed; see `AllGather`."""
        size, piece = group.size(), input_tensor.numel()
        if input_tensor.dtype not in _FLOATS:  # frozen integers, or several types as bytes
            self.sent_bytes = None
            outputs = list(output_tensor.view(size, piece))
            with translated(self._here, _GATHERING):
                exact: dist.Work | None = dist.all_gather(
                    outputs, input_tensor.clone(), group=group, async_op=async_op
                )
            return exact
        row = _whole_blocks(input_tensor.view(1, piece), self._packer.block)
        packed = _packed_rows(self._packer, 1, row)
        length = self._packer.packed_bytes(row.shape[1])
        self._packer.pack(row[0], packed[0, :length])
        self.sent_bytes = packed.shape[1]
        received = torch.empty(size, packed.shape[1], dtype=torch.uint8, device=packed.device)
        with translated(self._here, _GATHERING):
            under_way = dist.all_gather(list(received), packed[0], group=group, async_op=True)
        decode = partial(self._unpack, received[:, :length], output_tensor.view(size, piece), row.shape[1])
        work = _Decoding(under_way, decode)
        if async_op:
            return work
        work.wait()
        return None

    def _unpack(self, received: torch.Tensor, outputs: torch.Tensor, count: int) -> None:
        is_direct = outputs.dtype == torch.float32 and outputs.shape[1] == count
        spare = torch.empty(0 if is_direct else count, dtype=torch.float32, device=outputs.device)
        for packed, output in zip(received, outputs, strict=True):
            self._packer.unpack(packed, output if is_direct else spare)
            if not is_direct:
                output.copy_(spare[: output.numel()])


class _Decoding(dist.Work):
    """An exchange on its way, and what is to be done with what it brings, once, by who waits."""

    def __init__(self, under_way: Any, decode: Callable[[], None]) -> None:
        super().__init__()
        self._under_way, self._decode = under_way, decode
        self._is_over = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the numbers are there."""
        if not self._is_over:
            self._under_way.wait(timeout) if timeout else self._under_way.wait()
            self._is_over = True
            with torch.no_grad():
                self._decode()
        return True


def _whole_blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Return `rows` as float32, each filled up with zeros to whole blocks; themselves where they are that."""
    piece = rows.shape[1]
    length = max(1, -(-piece // block)) * block
    if length == piece and rows.dtype == torch.float32:
        return rows
    padded = torch.zeros(len(rows), length, dtype=torch.float32, device=rows.device)
    padded[:, :piece].copy_(rows)
    return padded


def _packed_rows(packer: Packer, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return memory for `count` packed rows of whole words, where a scale can be read."""
    length = -(-packer.packed_bytes(like.shape[1]) // 4) * 4
    return torch.empty(count, length, dtype=torch.uint8, device=like.device)

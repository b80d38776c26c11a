"""The process group: c10d's operations, each put into words for other ranks and carried out by `collectives`.

Every rank receives the indices and values of all others and adds them in the same order: all have the same
bits. Ranks may have different numbers of rows; they travel padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..messages import accumulates_in_fp32, divide
from . import collectives
from .calls import GroupWork
from .collectives import GroupExchange, describe, flattened, land, land_all, name_of, only, split, take, take_all
from .group_base import GroupBase


# Sums of sparse tensors in coordinate format: the rows of all ranks, added in the order of ranks.
def describe_sparse(tensor: torch.Tensor) -> str:
    """Return what must be equal on all ranks: "a sparse float32 of (1000, 16), 1 dimension of them sparse"."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"a sparse {kind} of {tuple(tensor.shape)}, {tensor.sparse_dim()} of its dimensions sparse"


def sum_sparse(
    exchange: GroupExchange, mine: torch.Tensor, operation: str, counts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return the sum or mean over ranks of sparse tensors, coalesced: the same bits on every rank.

    Args:
        exchange: the ranks.
        mine: this rank's tensor, coalesced.
        operation: ``SUM`` or ``AVG``.
        counts: of each rank, one number: its rows.
    """
    rows, width = [count for (count,) in counts], mine.sparse_dim()
    indices = _of_all(exchange, mine.indices().t(), rows)
    values = _of_all(exchange, mine.values(), rows)
    positions = [_positions(each, mine.shape[:width]) for each in indices]
    together, places = torch.unique(torch.cat(positions), return_inverse=True)
    wide = torch.float32 if accumulates_in_fp32(mine.dtype) else mine.dtype
    total = torch.zeros((len(together), *mine.shape[width:]), dtype=wide)
    for place, value in zip(places.split(rows), values, strict=True):
        # A rank has each position once: no two of these additions meet.
        total[place] = total[place] | value if wide == torch.bool else total[place] + value
    if operation == "AVG":
        divide(total, exchange.size)
    unraveled = torch.stack(torch.unravel_index(together, mine.shape[:width]))
    return torch.sparse_coo_tensor(
        unraveled, total.to(mine.dtype), mine.shape, is_coalesced=True, check_invariants=False
    )


def _of_all(exchange: GroupExchange, mine: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of every rank; `mine`: (rows, ...)."""
    padded = torch.zeros((max(rows), *mine.shape[1:]), dtype=mine.dtype)
    padded[: len(mine)] = mine
    outs = [torch.empty_like(padded) for _ in rows]
    if padded.numel():
        collectives.all_gather(exchange, padded.reshape(-1), [out.view(-1) for out in outs])
    return [out[:count] for out, count in zip(outs, rows, strict=True)]


def _positions(indices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the place of each index, (rows, dimensions), among all entries of `shape`: (rows)."""
    found = torch.zeros(len(indices), dtype=torch.int64)
    for dimension, count in enumerate(shape):
        found = found * count + indices[:, dimension]
    return found


Tensors = Sequence[torch.Tensor]


class _Landing(NamedTuple):
    """Where the result of a call is when it is over, and where the user wants it: see `flat.land`."""

    flats: Tensors
    tensors: Tensors


class ProcessGroup(GroupBase):
    """A group of `torch.distributed`. Made by `create.make_group`, on all its ranks at once."""

    # -- from one rank, or to one ---------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Give all ranks the tensor of the root."""
        root = 0 if opts is None else opts.rootRank
        return self._in_place(
            "broadcast", tensors, opts, partial(_each_broadcast, root=root), f" from {self._at(root)}"
        )

    def reduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Give the root all ranks' tensors combined."""
        opts = opts or dist.ReduceOptions()
        root, operation = opts.rootRank, _common_name(opts, tensors)

        def body(exchange: GroupExchange, flats: Tensors) -> None:
            for flat in flats:
                collectives.reduce(exchange, flat, root, operation)

        return self._in_place(f"reduce({operation})", tensors, opts, body, f" to {self._at(root)}")

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """Give the root the tensors of all ranks."""
        root = 0 if opts is None else opts.rootRank
        source = only(inputs, "gather")
        targets = list(only(outputs, "gather")) if self.rank() == root else []
        if self.rank() == root:
            self._require_like(source, targets, "gather")
        flat, outs = flattened(source), [flattened(each, written=True) for each in targets]

        def body(exchange: GroupExchange, _: Sequence[Sequence[int]]) -> None:
            take(flat, source)
            collectives.gather(exchange, flat, outs, root)
            land_all(outs, targets)

        return self._begin(f"gather of {describe([flat])} to {self._at(root)}", body, targets, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        """Give each rank its tensor of those that the root has."""
        root = 0 if opts is None else opts.rootRank
        target = only(outputs, "scatter")
        sources = list(only(inputs, "scatter")) if self.rank() == root else []
        if self.rank() == root:
            self._require_like(target, sources, "scatter")
        out, pieces = flattened(target, written=True), [flattened(each) for each in sources]

        def body(exchange: GroupExchange, _: Sequence[Sequence[int]]) -> None:
            take_all(pieces, sources)
            collectives.scatter(exchange, out, pieces, root)
            land(out, target)

        return self._begin(f"scatter of {describe([out])} from {self._at(root)}", body, [target], opts)

    # -- sums -----------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Give all ranks all ranks' tensors combined, with the same bits."""
        operation = _common_name(opts or dist.AllreduceOptions(), tensors)
        if any(tensor.layout == torch.sparse_coo for tensor in tensors):
            return self._sum_sparse(only(tensors, "all_reduce, one of them sparse,"), operation, opts)
        return self._in_place(f"all_reduce({operation})", tensors, opts, partial(_each_sum, operation=operation))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """As `allreduce`, of several tensors."""
        return self.allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        """Combine all ranks' lists, and give each rank the entry of its number."""
        sources = list(only(inputs, "reduce_scatter"))
        self._require_like(only(outputs, "reduce_scatter"), sources, "reduce_scatter")
        flats = [flattened(each) for each in sources]
        return self._sum_pieces("reduce_scatter", outputs, [flats], opts, partial(take_all, flats, sources))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
        """Combine all ranks' tensors, and give each rank its part."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """As `reduce_scatter_single`, of several tensors."""
        flats = [flattened(source) for source in inputs]
        pieces = [self._cut(flat, out, "reduce_scatter") for out, flat in zip(outputs, flats, strict=True)]
        return self._sum_pieces("reduce_scatter_single", outputs, pieces, opts, partial(take_all, flats, inputs))

    # -- from all to all ------------------------------------------------------------------------------

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """Give all ranks the tensors of all."""
        if len(outputs) != len(inputs) or not inputs:
            raise ValueError(f"farandole: all_gather of {len(inputs)} tensors into {len(outputs)} lists")
        for source, targets in zip(inputs, outputs, strict=True):
            self._require_like(source, targets, "all_gather")
        targets = [each for column in outputs for each in column]
        rooms = [[flattened(each, written=True) for each in column] for column in outputs]
        flats = [room for column in rooms for room in column]
        return self._collect("all_gather", rooms, inputs, opts, _Landing(flats, targets))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """As `allgather`, of several tensors; `outputs` has a list of them for each rank."""
        if len(outputs) != self.size():
            raise ValueError(f"farandole: all_gather into {len(outputs)} lists, expected one for each rank")
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
        """Give all ranks the tensors of all, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """As `all_gather_single`, of several tensors."""
        wholes = [flattened(output, written=True) for output in outputs]
        rooms = [self._cut(whole, source, "all_gather") for whole, source in zip(wholes, inputs, strict=True)]
        return self._collect("all_gather_single", rooms, inputs, opts, _Landing(wholes, outputs))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """Give each rank the tensor of its number from every rank's list."""
        for tensors in (outputs, inputs):
            if len(tensors) != self.size():
                raise ValueError(f"farandole: all_to_all of {len(tensors)} tensors among {self.size()} ranks")
        outs, pieces = [flattened(each, written=True) for each in outputs], [flattened(each) for each in inputs]
        return self._swap(outs, pieces, opts, partial(take_all, pieces, inputs), _Landing(outs, outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> GroupWork:
        """Give each rank its part of every rank's tensor; parts are cut along the first dimension."""
        whole, sent = flattened(output, written=True), flattened(source)
        outs = split(whole, output, output_split_sizes, self.size())
        pieces = split(sent, source, input_split_sizes, self.size())
        return self._swap(outs, pieces, opts, partial(take, sent, source), _Landing([whole], [output]))

    # -- point to point -------------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> GroupWork:
        """Send a tensor to a rank of the group."""
        source = only(tensors, "send")
        flat = flattened(source)
        take(flat, source)
        call = f"send of {describe([flat])} to {self._at(peer)}, tag {tag}"
        work = GroupWork(call, self._names[self.rank()], tensors)
        self._mail(tag).post(flat, peer, tag, call=call, work=work, is_sent=True, seconds=self._timeout_seconds)
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> GroupWork:
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        """Receive a tensor from whichever rank sends one with this tag."""
        return self._receive(tensors, None, tag)

    # -- order and end --------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> GroupWork:
        """Let the work be over when all ranks have made this call."""
        return self._begin("barrier", lambda *_: None, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, for at most `timeout`; raise `Stalled`, naming who is missing."""
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        self._begin("monitored_barrier", lambda *_: None, [], None, seconds=seconds).wait()

    # The names of these before torch 2.13, which DTensor, FSDP2 and users' code of that time call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- common parts ---------------------------------------------------------------------------------

    def _in_place(
        self,
        name: str,
        tensors: Tensors,
        opts: Any,
        body: Callable[[GroupExchange, Tensors], None],
        where: str = "",
    ) -> GroupWork:
        if not tensors:
            raise ValueError(f"farandole: {name} of no tensors")
        flats = [flattened(tensor, written=True) for tensor in tensors]

        def perform(exchange: GroupExchange, _: Sequence[Sequence[int]]) -> None:
            if self.size() > 1:
                take_all(flats, tensors)
                body(exchange, flats)
                land_all(flats, tensors)

        return self._begin(f"{name} of {describe(flats)}{where}", perform, list(tensors), opts)

    def _sum_sparse(self, tensor: torch.Tensor, operation: str, opts: Any) -> GroupWork:
        if operation not in ("SUM", "AVG") or not tensor.is_cpu:
            what = f"a tensor on {tensor.device}" if not tensor.is_cpu else f"{operation} of sparse tensors"
            raise NotImplementedError(f"farandole: {what}: sparse tensors have SUM and AVG, in CPU memory")
        if tensor._base is not None and tensor._base.is_complex():
            tensor = tensor._base  # torch passes a complex one as real numbers, which do not share its memory
        mine: list[torch.Tensor] = []

        def rows_of_mine() -> list[int]:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                mine.append(tensor.detach().coalesce())
            return [mine[0]._nnz()]

        def body(exchange: GroupExchange, rows: Sequence[Sequence[int]]) -> None:
            # What the caller's tensor will hold must be of its own kind: later code writes to it. And `detach`
            # of a sparse tensor is another one: what is copied to it does not reach the caller's.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                (own,) = mine
                tensor.copy_(sum_sparse(exchange, own, operation, rows) if self.size() > 1 else own)

        call = f"all_reduce({operation}) of {describe_sparse(tensor)}"
        return self._begin(call, body, [tensor], opts, row=rows_of_mine)

    def _sum_pieces(
        self, name: str, outputs: Tensors, pieces: Sequence[Tensors], opts: Any, takes: Callable[[], None]
    ) -> GroupWork:
        operation = _common_name(opts or dist.ReduceScatterOptions(), outputs)
        outs = [flattened(output, written=True) for output in outputs]

        def body(exchange: GroupExchange, _: Sequence[Sequence[int]]) -> None:
            takes()
            for out, each in zip(outs, pieces, strict=True):
                if self.size() == 1:
                    out.copy_(each[0])
                else:
                    exchange.reduce_scatter(out, each, operation)
            land_all(outs, outputs)

        return self._begin(f"{name}({operation}) of {describe(outs)}", body, list(outputs), opts)

    def _collect(
        self, name: str, rooms: Sequence[Tensors], inputs: Tensors, opts: Any, landing: _Landing
    ) -> GroupWork:
        flats = [flattened(source) for source in inputs]

        def body(exchange: GroupExchange, _: Sequence[Sequence[int]]) -> None:
            take_all(flats, inputs)
            for flat, room in zip(flats, rooms, strict=True):
                collectives.all_gather(exchange, flat, room)
            land_all(*landing)

        return self._begin(f"{name} of {describe(flats)}", body, list(landing.tensors), opts)

    def _swap(
        self, outs: Tensors, pieces: Tensors, opts: Any, takes: Callable[[], None], landing: _Landing
    ) -> GroupWork:
        types = {each.dtype for each in (*outs, *pieces)}
        if len(types) > 1:
            raise ValueError(f"farandole: all_to_all of tensors of {sorted(map(str, types))}, expected one type")
        call = f"all_to_all of {str(types.pop()).removeprefix('torch.')}"
        row = [each.numel() for each in (*pieces, *outs)]

        def body(exchange: GroupExchange, rows: Sequence[Sequence[int]]) -> None:
            takes()
            collectives.all_to_all(exchange, outs, pieces, lengths=rows, call=call, names=self._names)
            land_all(*landing)

        return self._begin(call, body, list(landing.tensors), opts, row=lambda: row)

    def _receive(self, tensors: Tensors, peer: int | None, tag: int) -> GroupWork:
        target = only(tensors, "recv")
        flat = flattened(target, written=True)
        into = None if flat.data_ptr() == target.data_ptr() else target
        where = "any rank" if peer is None else self._at(peer)
        call = f"recv of {describe([flat])} from {where}, tag {tag}"
        work = GroupWork(call, self._names[self.rank()], tensors)
        self._mail(tag).post(
            flat, peer, tag, call=call, work=work, is_sent=False, seconds=self._timeout_seconds, into=into
        )
        return work

    def _cut(self, whole: torch.Tensor, part: torch.Tensor, name: str) -> list[torch.Tensor]:
        """Return one piece of `whole`, (elements,), for each rank, each as long as `part`."""
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise ValueError(
                f"farandole: {name}: one tensor has {describe([whole])} and the other {describe([part])}: "
                f"expected {self.size()} times as many, of one type"
            )
        count = part.numel()
        return [whole[i * count : (i + 1) * count] for i in range(self.size())]

    def _require_like(self, one: torch.Tensor, each: Tensors, name: str) -> None:
        if len(each) != self.size():
            raise ValueError(f"farandole: {name} with a list of {len(each)} tensors among {self.size()} ranks")
        for tensor in each:
            if tensor.numel() != one.numel() or tensor.dtype != one.dtype:
                raise ValueError(
                    f"farandole: {name}: a tensor of the list has {describe([tensor])}, the single one "
                    f"{describe([one])}: expected the same"
                )


def _each_broadcast(exchange: GroupExchange, flats: Tensors, root: int) -> None:
    for flat in flats:
        collectives.broadcast(exchange, flat, root)


def _each_sum(exchange: GroupExchange, flats: Tensors, operation: str) -> None:
    for flat in flats:
        exchange.all_reduce(flat, operation)


def _common_name(opts: Any, tensors: Tensors) -> str:
    """Return the name of the reduce operation, which all these tensors take."""
    names = [name_of(opts.reduceOp, tensor.dtype) for tensor in tensors]
    return names[0] if names else "SUM"

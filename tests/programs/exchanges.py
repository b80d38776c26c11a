"""Generated programs of collectives and messages: random groups, types, lengths, layouts, waits in any order.

What comes out is compared with what is worked out from the inputs of all ranks. Values are small whole numbers, so
that every result is exact in every type, and compared bit by bit.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
MOVED = (torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64)
"""Of these nothing is summed here."""
LENGTHS = (0, 1, 2, 3, 7, 17, 1000, 4097, 16_385, 70_001)
MOST_UNDER_WAY = 3
Check = Callable[[], None]


class Operation(NamedTuple):
    """One call of a program: the same on all ranks but for the values and how they lie in memory."""

    kind: str
    group: int
    dtype: torch.dtype
    length: int
    reduction: str
    root: int
    """A place in the group."""
    is_async: bool
    seed: int


class ExchangeProgram(NamedTuple):
    """Groups of ranks, the first of all, and the calls on them."""

    seed: int
    groups: tuple[tuple[int, ...], ...]
    operations: tuple[Operation, ...]


def draw(seed: int, size: int) -> ExchangeProgram:
    """Return the program of a seed for so many ranks."""
    dice = random.Random(seed)
    groups = [tuple(range(size))]
    groups += [tuple(sorted(dice.sample(range(size), dice.randint(1, size)))) for _ in range(dice.randint(0, 2))]
    operations = []
    for _ in range(dice.randint(5, 12)):
        group = dice.randrange(len(groups))
        kind = dice.choice(sorted(KINDS))
        dtype = dice.choice(FLOATS + INTEGERS if kind in SUMS else FLOATS + INTEGERS + MOVED)
        reductions = ["SUM", "SUM", "MIN", "MAX", "AVG", *([] if dtype.is_floating_point else ["BAND", "BXOR"])]
        operations.append(
            Operation(
                kind=kind,
                group=group,
                dtype=dtype,
                length=dice.choice(LENGTHS),
                reduction=dice.choice(reductions),
                root=dice.randrange(len(groups[group])),
                is_async=dice.random() < 0.5,
                seed=dice.randrange(2**30),
            )
        )
    return ExchangeProgram(seed, tuple(groups), tuple(operations))


def play(program: ExchangeProgram, make: Callable[[list[int]], Any]) -> None:
    """Carry out a program on this rank and check what it gives. `make`: makes a group, on all ranks."""
    rank = dist.get_rank()
    groups = [make(list(members)) for members in program.groups]
    order = random.Random(program.seed * 31 + rank)
    under_way: list[tuple[Any, Check]] = []
    for number, operation in enumerate(program.operations):
        members = program.groups[operation.group]
        if rank not in members:
            continue
        turn = _Turn(operation, groups[operation.group], members.index(rank), len(members))
        what = f"seed {program.seed}, operation {number} on ranks {members}: {operation}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 2.13 deprecates names that older versions have
            works, check = KINDS[operation.kind](turn)
        pending = [work for work in works if work is not None]
        for work in pending[:-1] if operation.is_async else pending:
            work.wait()
        under_way.append((pending[-1] if pending and operation.is_async else None, _named(check, what)))
        order.shuffle(under_way)
        while len(under_way) > (MOST_UNDER_WAY if operation.is_async else 0):
            _settle(under_way.pop())
    for each in under_way:
        _settle(each)
    for group in reversed(groups):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group=group)
            dist.destroy_process_group(group)


def _settle(one: tuple[Any, Check]) -> None:
    work, check = one
    if work is not None:
        work.wait()
    check()


def _named(check: Check, what: str) -> Check:
    def checked() -> None:
        try:
            check()
        except AssertionError as wrong:
            raise AssertionError(f"{what}: {wrong}") from None

    return checked


class _Turn:
    """An operation on one rank of its group."""

    def __init__(self, operation: Operation, group: Any, rank: int, size: int) -> None:
        self.rank, self.size, self.length, self.root = rank, size, operation.length, operation.root
        self.group, self._operation = group, operation
        self.named: dict[str, Any] = {"group": group, "async_op": operation.is_async}
        self.red = getattr(dist.ReduceOp, operation.reduction)
        self._layout = random.Random(operation.seed * 7 + rank)

    def values(self, rank: int, part: int = 0, length: int | None = None) -> torch.Tensor:
        """Return what `rank` has as its `part`: the same wherever it is asked for."""
        dice = torch.Generator().manual_seed(self._operation.seed + 97 * rank + part)
        numbers = torch.randint(1, 4, (self.length if length is None else length,), generator=dice)
        return numbers.gt(1) if self._operation.dtype == torch.bool else numbers.to(self._operation.dtype)

    def laid(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values somewhere in memory: contiguous, at an offset, with gaps, transposed."""
        form, count = self._layout.randrange(4), values.numel()
        if form == 1:
            return torch.cat([values.new_zeros(3), values])[3:]
        if form == 2:
            room = values.new_zeros(2 * count)[::2]
        elif form == 3 and count % 2 == 0 and count:
            return values.view(2, count // 2).t().contiguous().t()
        else:
            return values.clone()
        room.copy_(values)
        return room

    def room(self, length: int | None = None) -> torch.Tensor:
        """Return where a result is to be written."""
        return self.laid(self.values(self.rank, 50, length))

    def expect(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare bits."""
        one, other = (_bytes_of(each) for each in (found, expected))
        assert torch.equal(one, other), f"{found.reshape(-1)[:6]} is not {expected.reshape(-1)[:6]}"

    def expect_all(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        for one, other in zip(found, expected, strict=True):
            self.expect(one, other)

    def combined(self, part: int = 0, length: int | None = None) -> torch.Tensor:
        """Return that part of all ranks, combined."""
        rows = [self.values(rank, part, length) for rank in range(self.size)]
        wide = rows[0].double() if rows[0].is_floating_point() else rows[0].clone()
        for row in rows[1:]:
            wide = _PAIRWISE[self._operation.reduction](wide, row.to(wide.dtype))
        if self._operation.reduction == "AVG":
            wide = torch.div(wide, self.size, rounding_mode=None if wide.is_floating_point() else "trunc")
        return wide.to(rows[0].dtype)


_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BXOR": torch.bitwise_xor,
}
_Played = tuple[Sequence[Any], Check]


def _all_reduce(turn: _Turn) -> _Played:
    mine = turn.laid(turn.values(turn.rank))
    return [dist.all_reduce(mine, turn.red, **turn.named)], lambda: turn.expect(mine, turn.combined())


def _coalesced(turn: _Turn) -> _Played:
    lengths = [turn.length // (part + 1) + 1 for part in range(3)]
    mine = [turn.laid(turn.values(turn.rank, part, length)) for part, length in enumerate(lengths)]
    expected = [turn.combined(part, length) for part, length in enumerate(lengths)]
    work = dist.all_reduce_coalesced(mine, turn.red, **turn.named)
    return [work], lambda: turn.expect_all(mine, expected)


def _chain(turn: _Turn) -> _Played:
    """A sum of what the call before it, which nobody has waited for, gives."""
    mine = turn.laid(turn.values(turn.rank))
    named = turn.named | {"async_op": True}
    works = [dist.broadcast(mine, group_src=turn.root, **named), dist.all_reduce(mine, dist.ReduceOp.MAX, **named)]
    return works, lambda: turn.expect(mine, turn.values(turn.root))


def _broadcast(turn: _Turn) -> _Played:
    mine = turn.laid(turn.values(turn.rank))
    work = dist.broadcast(mine, group_src=turn.root, **turn.named)
    return [work], lambda: turn.expect(mine, turn.values(turn.root))


def _reduce(turn: _Turn) -> _Played:
    mine = turn.laid(turn.values(turn.rank))
    expected = turn.combined() if turn.rank == turn.root else turn.values(turn.rank)
    work = dist.reduce(mine, group_dst=turn.root, op=turn.red, **turn.named)
    return [work], lambda: turn.expect(mine, expected)


def _all_gather(turn: _Turn) -> _Played:
    outs = [turn.room() for _ in range(turn.size)]
    work = dist.all_gather(outs, turn.laid(turn.values(turn.rank)), **turn.named)
    return [work], lambda: turn.expect_all(outs, [turn.values(rank) for rank in range(turn.size)])


def _all_gather_single(turn: _Turn) -> _Played:
    out = turn.room(turn.size * turn.length)
    work = dist.all_gather_into_tensor(out.reshape(-1) if out.is_contiguous() else out, _flat(turn), **turn.named)
    expected = torch.cat([turn.values(rank) for rank in range(turn.size)])
    return [work], lambda: turn.expect(out, expected)


def _gather(turn: _Turn) -> _Played:
    outs = [turn.room() for _ in range(turn.size)] if turn.rank == turn.root else None
    work = dist.gather(turn.laid(turn.values(turn.rank)), outs, group_dst=turn.root, **turn.named)
    expected = [turn.values(rank) for rank in range(turn.size)]
    return [work], lambda: None if outs is None else turn.expect_all(outs, expected)


def _scatter(turn: _Turn) -> _Played:
    parts = [turn.laid(turn.values(turn.root, part)) for part in range(turn.size)]
    out = turn.room()
    work = dist.scatter(out, parts if turn.rank == turn.root else None, group_src=turn.root, **turn.named)
    return [work], lambda: turn.expect(out, turn.values(turn.root, turn.rank))


def _reduce_scatter(turn: _Turn) -> _Played:
    out = turn.room()
    parts = [turn.laid(turn.values(turn.rank, part)) for part in range(turn.size)]
    work = dist.reduce_scatter(out, parts, turn.red, **turn.named)
    return [work], lambda: turn.expect(out, turn.combined(turn.rank))


def _reduce_scatter_single(turn: _Turn) -> _Played:
    out = turn.values(turn.rank, 50)
    whole = torch.cat([turn.values(turn.rank, part) for part in range(turn.size)])
    work = dist.reduce_scatter_tensor(out, whole, turn.red, **turn.named)
    return [work], lambda: turn.expect(out, turn.combined(turn.rank))


def _all_to_all(turn: _Turn) -> _Played:
    outs = [turn.room() for _ in range(turn.size)]
    parts = [turn.laid(turn.values(turn.rank, part)) for part in range(turn.size)]
    work = dist.all_to_all(outs, parts, **turn.named)
    return [work], lambda: turn.expect_all(outs, [turn.values(rank, turn.rank) for rank in range(turn.size)])


def _all_to_all_uneven(turn: _Turn) -> _Played:
    def length(source: int, target: int) -> int:
        return (turn.length % 61) * ((source + 2 * target) % 3)

    sent = [length(turn.rank, other) for other in range(turn.size)]
    expected = [length(other, turn.rank) for other in range(turn.size)]
    whole = torch.cat([turn.values(turn.rank, part, count) for part, count in enumerate(sent)])
    out = turn.values(turn.rank, 50, sum(expected))
    work = dist.all_to_all_single(out, whole, expected, sent, **turn.named)
    result = torch.cat([turn.values(rank, turn.rank, count) for rank, count in enumerate(expected)])
    return [work], lambda: turn.expect(out, result)


def _messages(turn: _Turn) -> _Played:
    """Two to the next rank, of one tag, and one with a tag of its own that is received from anybody."""
    if turn.size == 1:
        return [], lambda: None
    to, source = (turn.rank + 1) % turn.size, (turn.rank - 1) % turn.size
    outs = [turn.room(), turn.room(), turn.room()]
    tag, own = turn._operation.seed % 1000, 1000 + turn._operation.seed % (2**31 - 1000)
    works = [
        dist.irecv(out, group=turn.group, group_src=who, tag=word)
        for out, who, word in zip(outs, (source, source, None), (tag, tag, own), strict=True)
    ]
    works += [
        dist.isend(turn.laid(turn.values(turn.rank, part)), group=turn.group, group_dst=to, tag=word)
        for part, word in ((0, tag), (1, tag), (2, own))
    ]
    return works[::-1], lambda: turn.expect_all(outs, [turn.values(source, part) for part in range(3)])


def _objects(turn: _Turn) -> _Played:
    found: list[Any] = [None] * turn.size
    dist.all_gather_object(found, {"rank": turn.rank, "text": "x" * turn.length}, group=turn.group)
    assert found == [{"rank": rank, "text": "x" * turn.length} for rank in range(turn.size)]
    return [], lambda: None


def _barrier(turn: _Turn) -> _Played:
    return [dist.barrier(**turn.named)], lambda: None


def _flat(turn: _Turn) -> torch.Tensor:
    mine = turn.laid(turn.values(turn.rank))
    return mine.reshape(-1)


SUMS: dict[str, Callable[[_Turn], _Played]] = {
    "all-reduce": _all_reduce,
    "chain": _chain,
    "coalesced": _coalesced,
    "reduce": _reduce,
    "reduce-scatter": _reduce_scatter,
    "reduce-scatter of one": _reduce_scatter_single,
}
KINDS: dict[str, Callable[[_Turn], _Played]] = SUMS | {
    "all-gather": _all_gather,
    "all-gather into one": _all_gather_single,
    "all-to-all": _all_to_all,
    "all-to-all, uneven": _all_to_all_uneven,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "messages": _messages,
    "objects": _objects,
    "scatter": _scatter,
}


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.numel(), dtype=values.dtype).copy_(values.reshape(-1)).view(torch.uint8)

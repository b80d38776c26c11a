"""Generated programs of collectives: each step is played on two groups of the same ranks, and results compared.

Values are small whole numbers, so that every sum is exact in every type and bits can be compared.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

TYPES = (
    torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
LENGTHS = (0, 1, 3, 17, 1000, 5000, 70_001, 400_003)
Tensors = list[torch.Tensor]


@dataclass
class Step:
    """What one step of a program does; the same on all ranks but for the values."""

    name: str
    dtype: torch.dtype
    length: int
    root: int
    operation: str
    is_async: bool
    seed: int

    def values(self, rank: int, count: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        found = torch.randint(1, 4, (self.length if count is None else count,), generator=generator)
        return found > 1 if self.dtype == torch.bool else found.to(self.dtype)


def draw(seed: int, size: int) -> Step:
    dice = random.Random(seed)
    step = Step(
        name=dice.choice(sorted(PLAYS)),
        dtype=dice.choice(TYPES),
        length=dice.choice(LENGTHS),
        root=dice.randrange(size),
        operation=dice.choice(("SUM", "SUM", "SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "AVG")),
        is_async=dice.random() < 0.4,
        seed=seed,
    )
    whole = not (step.dtype.is_floating_point or step.dtype.is_complex)
    if (step.operation in ("BAND", "BOR", "BXOR")) != whole or step.operation == "AVG":
        step.operation = "SUM" if step.operation != "AVG" or whole else "AVG"
    if step.dtype == torch.bool and "reduce" in step.name:
        step.dtype = torch.uint8  # gloo adds bytes there
    if step.dtype.is_complex:
        step.operation = "SUM"
    return step


def play(step: Step, group: dist.ProcessGroup) -> Tensors:
    """Carry the step out and return what was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 2.13 deprecates names that older versions have
        written, work = PLAYS[step.name](step, group)
        if step.is_async and work is not None:
            work.wait()
    return written


def _red(step: Step) -> Any:
    return getattr(dist.ReduceOp, step.operation)


def _all_reduce(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    tensor = step.values(group.rank())
    return [tensor], dist.all_reduce(tensor, _red(step), group=group, async_op=step.is_async)


def _broadcast(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    tensor = step.values(group.rank())
    return [tensor], dist.broadcast(tensor, group_src=step.root, group=group, async_op=step.is_async)


def _reduce(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    tensor = step.values(group.rank())
    work = dist.reduce(tensor, group_dst=step.root, op=_red(step), group=group, async_op=step.is_async)
    return [tensor] if group.rank() == step.root else [], work


def _all_gather(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    mine = step.values(group.rank())
    out = [torch.zeros_like(mine) for _ in range(group.size())]
    return out, dist.all_gather(out, mine, group=group, async_op=step.is_async)


def _all_gather_single(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    mine = step.values(group.rank())
    out = mine.new_zeros(group.size() * mine.numel())
    return [out], dist.all_gather_into_tensor(out, mine, group=group, async_op=step.is_async)


def _gather(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    mine = step.values(group.rank())
    out = [torch.zeros_like(mine) for _ in range(group.size())] if group.rank() == step.root else None
    return out or [], dist.gather(mine, out, group_dst=step.root, group=group, async_op=step.is_async)


def _scatter(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    pieces = [step.values(rank) for rank in range(group.size())] if group.rank() == step.root else None
    out = torch.zeros_like(step.values(0))
    return [out], dist.scatter(out, pieces, group_src=step.root, group=group, async_op=step.is_async)


def _reduce_scatter(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    pieces = list(step.values(group.rank(), step.length * group.size()).chunk(group.size()))
    pieces = [piece.clone() for piece in pieces] or [step.values(0)] * group.size()
    out = torch.zeros_like(step.values(0))
    return [out], dist.reduce_scatter(out, pieces, _red(step), group=group, async_op=step.is_async)


def _reduce_scatter_single(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    whole = step.values(group.rank(), step.length * group.size())
    out = torch.zeros_like(step.values(0))
    return [out], dist.reduce_scatter_tensor(out, whole, _red(step), group=group, async_op=step.is_async)


def _all_to_all_single(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    mine = step.values(group.rank(), step.length * group.size())
    out = torch.zeros_like(mine)
    return [out], dist.all_to_all_single(out, mine, group=group, async_op=step.is_async)


def _all_to_all_uneven(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    size, rank = group.size(), group.rank()
    dice = random.Random(step.seed)
    counts = [[dice.randrange(step.length % 999 + 1) for _ in range(size)] for _ in range(size)]
    sent, expected = counts[rank], [row[rank] for row in counts]
    mine = step.values(rank, 2 * sum(sent)).view(sum(sent), 2)
    out = mine.new_zeros(sum(expected), 2)
    return [out], dist.all_to_all_single(out, mine, expected, sent, group=group, async_op=step.is_async)


def _coalesced(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    tensors = [step.values(group.rank(), count) for count in (step.length % 1000, 5, 70)]
    with dist._coalescing_manager(group, async_ops=step.is_async) as works:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors, works if step.is_async else None


def _future(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    tensor = step.values(group.rank())
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return [work.get_future().then(lambda future: future.value()[0]).wait()], None


def _ring(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    size, rank = group.size(), group.rank()
    mine, out = step.values(rank), torch.zeros_like(step.values(rank))
    if size == 1 or not mine.numel():
        return [], None
    tag = step.seed % 7
    works = [
        dist.irecv(out, group=group, group_src=(rank - 1) % size, tag=tag),
        dist.isend(mine, group=group, group_dst=(rank + 1) % size, tag=tag),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [out], None


def _objects(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, {"rank": group.rank(), "length": step.length}, group=group)
    return [torch.tensor([each["rank"] + each["length"] for each in said])], None


def _barrier(step: Step, group: dist.ProcessGroup) -> tuple[Tensors, Any]:
    return [], dist.barrier(group=group, async_op=step.is_async)


PLAYS: dict[str, Callable[[Step, dist.ProcessGroup], tuple[Tensors, Any]]] = {
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_reduce": _all_reduce,
    "all_reduce coalesced": _coalesced,
    "all_reduce future": _future,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single uneven": _all_to_all_uneven,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "objects": _objects,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "ring": _ring,
    "scatter": _scatter,
}

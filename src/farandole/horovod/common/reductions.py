"""The reductions by Horovod's numbers, and the older argument `average`."""

from __future__ import annotations

from ..named_ops.operations import Reduction
from .exceptions import HorovodUnsupportedError
from .util import get_average_backwards_compatibility_fun

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

REDUCTIONS: dict[int, Reduction] = {
    Average: "average",
    Sum: "sum",
    Adasum: "adasum",
    Min: "min",
    Max: "max",
    Product: "product",
}


class _Reductions:
    Average = Average
    Sum = Sum


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_Reductions)


def reduction_of(op: int) -> Reduction:
    """Return the engine's word for a reduction; raise ValueError for what is none."""
    if not isinstance(op, int) or op not in REDUCTIONS:
        raise ValueError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    return REDUCTIONS[op]


def check_sum_or_average(op: int) -> None:
    """Refuse the other reductions, for a reducescatter."""
    if op not in (Average, Sum):
        raise HorovodUnsupportedError(
            f"Reducescatter currently only supports AVERAGE and SUM. ({reduction_of(op)} was asked for)"
        )

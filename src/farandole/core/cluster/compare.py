"""Two clusters, figure by figure: what differs by more than its interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .cluster import Cluster, Coefficient, ComputeRate, Tier

_SAME = 1e-9


@dataclass(frozen=True)
class FigureChange:
    """One figure in both clusters. None: that cluster does not have it."""

    path: str
    """As in the file, such as "tiers.network.collectives.all_reduce.bytes_per_second"."""
    before: Coefficient | None
    after: Coefficient | None

    @property
    def ratio(self) -> float | None:
        """After over before; None where one is missing, or before is 0 and after is not."""
        if self.before is None or self.after is None:
            return None
        if self.before.value == self.after.value:
            return 1.0
        return None if self.before.value == 0 else self.after.value / self.before.value

    @property
    def is_disjoint(self) -> bool | None:
        """Whether the intervals do not overlap: the change is more than noise. None: an interval is not known."""
        if self.before is None or self.after is None:
            return None
        if None in (self.before.low, self.before.high, self.after.low, self.after.high):
            return None
        (low, high), (other_low, other_high) = self.before.interval(), self.after.interval()
        return high < other_low or other_high < low

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "path": self.path,
            "before": None if self.before is None else dataclasses.asdict(self.before),
            "after": None if self.after is None else dataclasses.asdict(self.after),
            "ratio": self.ratio,
            "is_disjoint": self.is_disjoint,
        }


def compare_clusters(before: Cluster, after: Cluster) -> list[FigureChange]:
    """Return every figure of either cluster, in the order of the file; those that are equal too.

    Tiers are matched by name, and rates of computation by precision and size.
    """
    one, other = dict(figures_of(before)), dict(figures_of(after))
    return [FigureChange(path, one.get(path), other.get(path)) for path in {**one, **other}]


def figures_of(cluster: Cluster) -> Iterator[tuple[str, Coefficient]]:
    """Return every figure with its path; numbers without a source, such as ratios, as figures without interval."""
    yield from _figures(cluster, "")


def is_changed(change: FigureChange) -> bool:
    """Return whether the two values differ at all, or one is missing."""
    ratio = change.ratio
    return ratio is None or not math.isclose(ratio, 1.0, rel_tol=_SAME)


def _figures(value: Any, path: str) -> Iterator[tuple[str, Coefficient]]:
    if isinstance(value, Coefficient):
        yield path, value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not path.endswith("version"):
            yield path, Coefficient(float(value))
    elif isinstance(value, ComputeRate):
        yield f"{path}.flops_per_second", value.flops_per_second
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _figures(getattr(value, each.name), f"{path}.{each.name}" if path else each.name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _figures(each, f"{path}.{key}")
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _figures(each, f"{path}.{_row(each, number)}")


def _row(value: Any, number: int) -> str:
    if isinstance(value, Tier):
        return value.name
    return f"{value.flops:.3g}" if isinstance(value, ComputeRate) else str(number)

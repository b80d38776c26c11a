"""Figures of a cluster by their paths, such as ``tiers.0.collectives.all_reduce.bytes_per_second``.

A path that ends in ``.*`` is all figures below it.

[Note: fitting factors] A term of a step is linear in latencies and in the inverses of speeds. What is fitted is by
which factor each differs from what the cluster says, by non-negative least squares on the relative error (every
observation counts alike, however long it took), drawn a little towards 1: figures that the observations do not
tell apart change together, and others not at all. Intervals are those of the bootstrap: the observations are drawn
anew and fitted, and 2.5 % of the factors lie on each side.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.cluster import Cluster, Coefficient
from ..core.vocabulary.config import FieldPath, numbers_of
from ..core.vocabulary.errors import ConfigError

_SPEED = "_per_second"


def figures_below(cluster: Cluster, path: str) -> dict[str, Coefficient]:
    """Return the figure of a path, or all figures below one that ends in ``.*``, by their own paths.

    Raises `ConfigError` if the cluster has none there.
    """
    prefix, star, _ = path.partition(".*")
    every = {str(at): each for at, _, each in numbers_of(cluster, FieldPath(""), whole=Coefficient)}
    figures = {
        at: each
        for at, each in every.items()
        if isinstance(each, Coefficient) and (at == prefix or (star and at.startswith(f"{prefix}.")))
    }
    if not figures:
        raise ConfigError(f"cluster {cluster.name}: there is no figure {path}")
    return figures


def is_speed(path: str) -> bool:
    """Return whether twice the figure is half the time."""
    return path.endswith(_SPEED)


def with_figures(cluster: Cluster, figures: Mapping[str, Coefficient]) -> Cluster:
    """Return the cluster with other figures at these paths."""
    changed: Any = cluster
    for path, figure in figures.items():
        changed = _replaced(changed, path.split("."), figure)
    found: Cluster = changed
    return found


def _entry(value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(value):
        return getattr(value, key, None)
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, tuple) and key.isdigit() and int(key) < len(value):
        return value[int(key)]
    return None


def _replaced(value: Any, keys: list[str], figure: Coefficient) -> Any:
    if not keys:
        return figure
    key, *rest = keys
    inner = _replaced(_entry(value, key), rest, figure)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{key: inner})
    if isinstance(value, Mapping):
        return {**value, key: inner}
    return (*value[: int(key)], inner, *value[int(key) + 1 :])


# Figures of a cluster that runs contradict, corrected.

# Least squares with coefficients that are not negative, for a few coefficients.
_ZERO = 1e-12
_ROUNDS = 10
"""Times the number of coefficients: a bound that no problem has been seen to reach."""


def non_negative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], *, near: Sequence[float], pull: float
) -> list[float]:
    """Return x >= 0 that minimises ``|rows x - targets|^2 + pull |x - near|^2``.

    `pull` is positive, so that there is one answer: what `rows` do not tell stays `near`. By the active set method
    on the normal equations: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23.

    >>> [round(x, 3) for x in non_negative_least_squares([[1, 0], [0, 1]], [2, -1], near=[1, 1], pull=1e-9)]
    [2.0, 0.0]
    """
    size = len(near)
    squares = [[sum(row[i] * row[j] for row in rows) + (pull if i == j else 0.0) for j in range(size)]
               for i in range(size)]  # fmt: skip
    wanted = [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) + pull * near[i]
              for i in range(size)]  # fmt: skip
    found, free = [0.0] * size, set[int]()
    for _ in range(_ROUNDS * size):
        slopes = [wanted[i] - sum(a * x for a, x in zip(squares[i], found, strict=True)) for i in range(size)]
        held = [i for i in range(size) if i not in free and slopes[i] > _ZERO * max(1.0, abs(wanted[i]))]
        if not held:
            break
        free.add(max(held, key=lambda i: slopes[i]))
        while True:
            order = sorted(free)
            solved = dict(zip(order, _solve(squares, wanted, order), strict=True))
            below = [i for i in order if solved[i] <= 0]
            if not below:
                found = [solved.get(i, 0.0) for i in range(size)]
                break
            ways = {i: found[i] / (found[i] - solved[i]) if found[i] > solved[i] else 0.0 for i in below}
            first = min(ways, key=lambda i: ways[i])
            found = [x + ways[first] * (solved[i] - x) if i in free else 0.0 for i, x in enumerate(found)]
            free.discard(first)
            found[first] = 0.0
    return found


def _solve(squares: Sequence[Sequence[float]], wanted: Sequence[float], order: Sequence[int]) -> list[float]:
    """Return the solution of the equations of `order`, by elimination; the matrix is positive definite."""
    table = [[squares[i][j] for j in order] + [wanted[i]] for i in order]
    size = len(order)
    for at in range(size):
        pivot = table[at]
        for row in table[at + 1 :]:
            factor = row[at] / pivot[at]
            for j in range(at, size + 1):
                row[j] -= factor * pivot[j]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(table[at][j] * found[j] for j in range(at + 1, size))
        found[at] = (table[at][size] - rest) / table[at][at]
    return found


LEAST_CHANGE = 0.05
"""A figure that is off by less is left as it is."""
_PULL = 1e-5
_DRAWS = 100
_LEAST_FACTOR = 0.1
"""A figure that is off by more than this takes two corrections: what vanishes in a fit was not told by it."""
_WIDEST = 0.15
"""Half of the interval, as a share, where too few observations were there to say."""
_FEW = 4
_LEAST_SECONDS = 1e-4
"""What stands for a latency of 0, of which there is no multiple."""


@dataclass(frozen=True)
class Observation:
    """What was measured, and what of the cluster it is made of."""

    name: str
    """Such as "compute of runs/a"."""
    seconds: float
    features: Mapping[str, float]
    """By path of a figure: the factor of a latency, and of the inverse of a speed, as in `Prediction.features`. By
    a path that ends in ``.*``: the seconds that all figures below it were predicted to take together."""
    other_seconds: float = 0.0
    """Part of `seconds` that comes from no figure of the cluster."""


@dataclass(frozen=True)
class Correction:
    """One figure, before and after."""

    path: str
    before: Coefficient
    after: Coefficient


@dataclass(frozen=True)
class Refit:
    """A corrected cluster."""

    cluster: Cluster
    corrections: tuple[Correction, ...]
    """Empty: no figure was off by more than `LEAST_CHANGE`."""
    error_before: float
    """Mean absolute relative error of the observations, by the figures as they were."""
    error_after: float
    notes: tuple[str, ...] = ()
    """What could not be corrected, and why."""


def refit(cluster: Cluster, observations: Sequence[Observation]) -> Refit:
    """Return the cluster with those figures corrected that are off. See [Note: fitting factors].

    Raises `ConfigError` for observations that nothing can be fitted to, or of figures that the cluster has not.
    """
    usable = [each for each in observations if each.seconds > each.other_seconds and any(each.features.values())]
    if not usable:
        raise ConfigError(
            "there is nothing to fit: the runs measured no term that figures of the cluster predict",
            remedy="give runs of a plan of farandole plan, with at least ten steps",
        )
    paths = sorted({path for each in usable for path, amount in each.features.items() if amount})
    below = {path: figures_below(cluster, path) for path in paths}
    _refuse_twice(below)
    near = [_start(path, below[path]) for path in paths]
    rows = [_row(each, paths, below) for each in usable]
    factors = _fit(rows, near)
    spread = _bootstrap(usable, rows, near)
    corrections = []
    for path, factor, start, (low, high) in zip(paths, factors, near, spread, strict=True):
        if abs(factor - start) <= LEAST_CHANGE:
            continue
        wide = _WIDEST * factor if sum(path in each.features for each in usable) < _FEW else 0.0
        interval = min(low, factor - wide), max(high, factor + wide)
        corrections += [
            Correction(own, figure, _scaled(own, figure, factor, interval)) for own, figure in below[path].items()
        ]
    fitted = [sum(factor * part for factor, part in zip(factors, row, strict=True)) for row in rows]
    before = [sum(start * part for start, part in zip(near, row, strict=True)) for row in rows]
    figures = {each.path: each.after for each in corrections}
    return Refit(
        with_figures(cluster, figures), tuple(corrections), _mean_error(before), _mean_error(fitted),
    )  # fmt: skip


def note_runs(cluster: Cluster, runs: Sequence[str]) -> Cluster:
    """Return the cluster with the runs that it is fitted to in its fingerprint.

    Raises `ConfigError` for a run that it is fitted to already: its prediction was made before that.
    """
    said = [each for each in cluster.fingerprint.get("fitted_to", "").split("; ") if each]
    for run in runs:
        if run in said:
            raise ConfigError(
                f"cluster {cluster.name} is fitted to {run} already",
                remedy="make a new plan with it, run that, and give its run; or give the file of before",
            )
    return replace(cluster, fingerprint={**cluster.fingerprint, "fitted_to": "; ".join([*said, *runs])})


def _refuse_twice(below: Mapping[str, Mapping[str, Coefficient]]) -> None:
    seen: dict[str, str] = {}
    for path, figures in below.items():
        for own in figures:
            if own in seen:
                raise ConfigError(f"observations speak of {own} by {seen[own]} and by {path}")
            seen[own] = path


def _start(path: str, figures: Mapping[str, Coefficient]) -> float:
    """Return the factor that is no change: 1; 0 for a latency of 0, which counts in `_LEAST_SECONDS`."""
    return 0.0 if not is_speed(path) and not path.endswith("*") and figures[path].value == 0 else 1.0


def _row(each: Observation, paths: Sequence[str], below: Mapping[str, Mapping[str, Coefficient]]) -> list[float]:
    """Return the seconds of each path at a factor of 1, over the seconds that were measured."""
    whole = each.seconds - each.other_seconds
    return [_seconds(path, each.features.get(path, 0.0), below[path]) / whole for path in paths]


def _seconds(path: str, amount: float, figures: Mapping[str, Coefficient]) -> float:
    if path.endswith(".*"):
        return amount
    value = figures[path].value
    return amount / value if is_speed(path) else amount * (value or _LEAST_SECONDS)


def _fit(rows: Sequence[Sequence[float]], near: Sequence[float]) -> list[float]:
    """Return the factors, none below `_LEAST_FACTOR` of what it was; the others are found beside those."""
    left = list(range(len(near)))
    factors = list(near)
    while left:
        targets = [1.0 - sum(factors[i] * row[i] for i in range(len(near)) if i not in left) for row in rows]
        own = [[row[i] for i in left] for row in rows]
        found = non_negative_least_squares(own, targets, near=[near[i] for i in left], pull=_PULL)
        for i, each in zip(left, found, strict=True):
            factors[i] = max(each, _LEAST_FACTOR * near[i])
        above = [i for i, each in zip(left, found, strict=True) if each > _LEAST_FACTOR * near[i]]
        if above == left:
            break
        left = above
    return factors


def _bootstrap(
    usable: Sequence[Observation], rows: Sequence[Sequence[float]], near: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the interval of each factor; observations are drawn among those of the same name."""
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(usable):
        groups.setdefault(each.name, []).append(number)
    draw = random.Random(0)
    drawn = []
    for _ in range(_DRAWS):
        picked = [rows[draw.choice(group)] for group in groups.values() for _ in group]
        drawn.append(_fit(picked, near))
    ordered = [sorted(values) for values in zip(*drawn, strict=True)]
    edge = round(0.025 * _DRAWS)
    return [(values[edge], values[-1 - edge]) for values in ordered]


def _scaled(path: str, figure: Coefficient, factor: float, interval: tuple[float, float]) -> Coefficient:
    low, high = min(interval[0], factor), max(interval[1], factor)
    if is_speed(path):
        return Coefficient(figure.value / factor, "fitted", figure.value / high, figure.value / low)
    value = figure.value or _LEAST_SECONDS
    return Coefficient(value * factor, "fitted", value * low, value * high)


def _mean_error(relative: Sequence[float]) -> float:
    return sum(abs(each - 1.0) for each in relative) / len(relative)
